# docker build -t regimen .
# docker build -t regimen --build-arg TORCH_BACKEND=cu130 .        PyTorch's build for GPUs
# docker run --rm -v "$PWD/runs:/home/regimen/regimen/runs" regimen train experiment=resnet18
FROM python:3.12-slim

ARG TORCH_BACKEND=cpu
RUN pip install --no-cache-dir uv
# An ordinary user trains: user 1000 has to be able to write to a folder of runs that is mounted.
RUN useradd --create-home --uid 1000 regimen
USER regimen
COPY --chown=regimen . /home/regimen/regimen
WORKDIR /home/regimen/regimen
RUN uv venv && uv pip install --no-cache --torch-backend $TORCH_BACKEND -e .
ENV PATH=/home/regimen/regimen/.venv/bin:$PATH
CMD ["train", "experiment=resnet18"]
