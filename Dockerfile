# docker build -t regimen .
# docker build -t regimen --build-arg TORCH_BACKEND=cu130 .        PyTorch's build for GPUs
# docker run --rm -v "$PWD/runs:/regimen/runs" regimen train experiment=resnet18
FROM python:3.12-slim

ARG TORCH_BACKEND=cpu
WORKDIR /regimen
COPY . .
RUN pip install --no-cache-dir uv
RUN uv venv && uv pip install --no-cache --torch-backend $TORCH_BACKEND -e .
ENV PATH=/regimen/.venv/bin:$PATH
CMD ["train", "experiment=resnet18"]
