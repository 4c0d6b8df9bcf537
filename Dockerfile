# The workbench on a GPU: docker build -t madmax . && docker run --gpus all --ipc host -p 8888:8888 madmax
# CUDA of the major version that torch 2.13 is built for, as DeepSpeed, which compiles here, refuses another; driver 580 or newer
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04
RUN apt-get update && apt-get install -y --no-install-recommends git iproute2 make python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /workbench
COPY . .
RUN python3 -m venv /opt/venv && /opt/venv/bin/pip install --no-cache-dir -r requirements.txt -c .ci/constraints.txt \
    && /opt/venv/bin/pip install --no-cache-dir -e '.[study]'
ENV PATH=/opt/venv/bin:$PATH
EXPOSE 8888
CMD ["jupyter", "lab", "--ip=0.0.0.0", "--allow-root", "--notebook-dir=notebooks"]
