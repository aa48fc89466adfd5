#!/usr/bin/env bash
# An HTTP server that knows nothing of locks, and `fencelock gate` before it: a holder that overslept cannot write any more.
# Needs python3 (for a server to write to) and curl. The tool is built, or `TOOL=$(command -v fencelock)` names it.
set -euo pipefail
cd "$(dirname "$0")/../.."
if [ -z "${TOOL:-}" ]; then
    cargo build --quiet -p fencelock-cli
    target="$(cargo metadata --format-version 1 --no-deps | python3 -c 'import json,sys; print(json.load(sys.stdin)["target_directory"])')"
fi
tool="${TOOL:-$target/debug/fencelock}"
dir="$(mktemp -d)"
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$dir"' EXIT
export FENCELOCK_URL="file:$dir/locks"

# The upstream: keeps what is PUT, and prints what it keeps.
python3 -u - > "$dir/upstream.port" <<'PYTHON' &
import http.server
class Keep(http.server.BaseHTTPRequestHandler):
    kept = b""
    def do_PUT(self):
        Keep.kept = self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(b"kept\n")
    def do_GET(self):
        self.answer(Keep.kept)
    def answer(self, body):
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers(); self.wfile.write(body)
    def log_message(self, *words): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Keep)
print(server.server_port, flush=True)
server.serve_forever()
PYTHON
until [ -s "$dir/upstream.port" ]; do sleep 0.05; done

# The gate.
"$tool" gate --json --listen 127.0.0.1:0 --upstream "http://127.0.0.1:$(cat "$dir/upstream.port")" --store "$dir/gate.redb" > "$dir/gate.log" &
until grep -q ready "$dir/gate.log"; do sleep 0.05; done
export GATE="http://$(python3 -c 'import json,sys; print(json.loads(open(sys.argv[1]).readline())["listen"])' "$dir/gate.log")/report"

put='curl -s -w "%{http_code}\n" -X PUT -H "Fencing-Token: $FENCELOCK_TOKEN" --data-binary'
echo "A takes the lock and remembers its token:"
old="$("$tool" run report -- sh -c 'echo $FENCELOCK_TOKEN')"
echo "  $old"
echo "B takes the lock after it, and writes:"
"$tool" run report -- sh -c "$put \"by B\" \$GATE"
echo "A wakes up, and writes with its old token:"
FENCELOCK_TOKEN="$old" sh -c "$put \"by A\" \$GATE" | tee "$dir/answer"
grep -q 412 "$dir/answer"
echo "Without a token: $(curl -s -o /dev/null -w '%{http_code}' -X PUT --data-binary x "$GATE")"
echo "What is kept: $(curl -s -H "Fencing-Token: 18446744073709551615" "$GATE")"
