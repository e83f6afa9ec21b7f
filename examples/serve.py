"""Answer requests over HTTP with a patched model, one request after the other.

    python examples/serve.py --recipe int4 --port 8000
    curl localhost:8000 -d '{"prompt": "What is the capital of France?"}'

This is Python's own http.server around generate(), to copy from. `accelpatch serve` is a server with OpenAI's API,
limits and keys, and hands over to vLLM or SGLang for many requests at once: docs/serving.md.
"""

import argparse
import json
from http.server import BaseHTTPRequestHandler, HTTPServer

import accelpatch

parser = argparse.ArgumentParser()
parser.add_argument("model", nargs="?", default="smollm2-135m")
parser.add_argument("--recipe", default="int8")
parser.add_argument("--port", type=int, default=8000)
options = parser.parse_args()

loaded = accelpatch.load(options.model, options.recipe)  # quantised while it is read: the float model is never whole
model, tokenizer = loaded.model, loaded.tokenizer


class Answers(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        messages = [{"role": "user", "content": asked["prompt"]}]
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        ).to(model.device)
        output = model.generate(**inputs, max_new_tokens=asked.get("max_new_tokens", 100))
        text = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps({"text": text}).encode())


HTTPServer(("127.0.0.1", options.port), Answers).serve_forever()
