"""A task for mode `serve`: one JSON line in, one JSON line out, for as long as there is input."""

import json
import sys

for line in sys.stdin:
    task = json.loads(line)
    answer = {"messageId": task["messageId"]}
    try:
        answer["result"] = {"words": len(task["payload"]["text"].split())}
    except (AttributeError, KeyError, TypeError):
        error = {"code": "NO_TEXT", "message": "payload.text is missing"}
        answer |= {"ack": False, "permanent": True, "error": error}
    print(json.dumps(answer), flush=True)
