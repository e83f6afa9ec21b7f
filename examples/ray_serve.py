"""Replicas of a patched model under Ray Serve, each on a GPU of its own: autoscaling, health checks, restarts.

pip install 'accelpatch[serve]' 'ray[serve]'
python examples/ray_serve.py smollm2-135m int8 2
curl localhost:8000 -d '{"prompt": "What is the capital of France?"}'
"""

import asyncio
import os
import sys
import threading

import torch
from ray import serve
from starlette.requests import Request

import accelpatch


@serve.deployment(max_ongoing_requests=4, health_check_period_s=5, health_check_timeout_s=30)
class Patched:
    def __init__(self, name: str, recipe: str):
        loaded = accelpatch.load(name, recipe, device="cuda" if torch.cuda.is_available() else "cpu")
        self.model, self.tokenizer = loaded.model, loaded.tokenizer
        self.turn = threading.Lock()  # one request after another: each gets the model's full speed

    def check_health(self) -> None:
        torch.ones(1, device=self.model.device).item()  # raises on a device that has failed

    def answer(self, prompt: str, new_tokens: int) -> str:
        chat, form = [{"role": "user", "content": prompt}], {"return_dict": True, "return_tensors": "pt"}
        inputs = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, **form).to(self.model.device)
        with self.turn:
            made = self.model.generate(**inputs, max_new_tokens=new_tokens)[0, inputs["input_ids"].shape[1] :]
        return self.tokenizer.decode(made, skip_special_tokens=True)

    async def __call__(self, request: Request) -> dict[str, str | int]:
        asked = await request.json()
        text = await asyncio.to_thread(self.answer, asked["prompt"], asked.get("max_new_tokens", 100))
        return {"text": text, "process": os.getpid()}


def application(name: str, recipe: str = "int8", replicas: int | str = 1) -> serve.Application:
    scaling = {"min_replicas": int(replicas), "max_replicas": 2 * int(replicas), "target_ongoing_requests": 2}
    needs = {"num_cpus": 0.5, "num_gpus": int(torch.cuda.is_available())}
    return Patched.options(autoscaling_config=scaling, ray_actor_options=needs).bind(name, recipe)


if __name__ == "__main__":
    serve.run(application(*(sys.argv[1:] or ["smollm2-135m"])), blocking=True)
