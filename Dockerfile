# fedslr on the CPU:
#   docker build --tag fedslr .
#   mkdir -p runs && docker run --rm --user "$(id -u)" --volume "$PWD/runs:/work/runs" fedslr demo
FROM python:3.11-slim AS build
WORKDIR /source
COPY . .
# The index of wheels for the CPU; a wheel for GPUs is ten times as large.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_CONSTRAINT=/source/constraints.txt
RUN python -m venv /opt/fedslr \
    && /opt/fedslr/bin/pip install --quiet --extra-index-url "$TORCH_INDEX" '.[deploy,export]'

FROM python:3.11-slim
COPY --from=build /opt/fedslr /opt/fedslr
RUN useradd --create-home --uid 1000 fedslr && install --directory --owner fedslr /work
USER 1000
WORKDIR /work
ENV PATH=/opt/fedslr/bin:$PATH MPLCONFIGDIR=/tmp/matplotlib
ENTRYPOINT ["fedslr"]
CMD ["--help"]
