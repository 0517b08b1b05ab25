# fedslr on the CPU:
#   docker build --tag fedslr --build-arg TORCH_INDEX=… .    # the package index with PyTorch's wheels for the CPU
#   mkdir -p runs && docker run --rm --user "$(id -u)" --volume "$PWD/runs:/work/runs" fedslr demo
FROM python:3.11-slim AS build
WORKDIR /source
COPY . .
# Without this index, pip installs the wheel for GPUs, which is ten times as large.
ARG TORCH_INDEX
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_CONSTRAINT=/source/constraints.txt
RUN python -m venv /opt/fedslr \
    && PIP_EXTRA_INDEX_URL="$TORCH_INDEX" /opt/fedslr/bin/pip install --quiet '.[deploy,export]'

FROM python:3.11-slim
COPY --from=build /opt/fedslr /opt/fedslr
RUN useradd --create-home --uid 1000 fedslr && install --directory --owner fedslr /work
USER 1000
WORKDIR /work
ENV PATH=/opt/fedslr/bin:$PATH MPLCONFIGDIR=/tmp/matplotlib
ENTRYPOINT ["fedslr"]
CMD ["--help"]
