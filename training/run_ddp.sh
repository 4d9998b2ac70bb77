#!/usr/bin/env bash
# Start training on N processes of this machine: training/run_ddp.sh [N] [flags of train_ddp.py]
# N defaults to the number of GPUs, or to 2 on a machine without one. SIGTERM, Ctrl-C and a terminal
# that is closed go to the ranks alone, so that they finish their step, save, and the launcher ends
# with their exit code. With MAX_RESTARTS=3 training/run_ddp.sh ... the ranks are restarted up to
# three times if one of them dies; they resume from the newest checkpoint.
set -u
# The real path, by which Python finds the packages of .venv.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
python=$here/../.venv/bin/python
[ -x "$python" ] || python=python3
if ! python=$(command -v -- "${PYTHON:-$python}"); then
  echo "error: PYTHON=${PYTHON:-python3}: no such program [flag-value]" >&2
  exit 2
fi

if [[ "${1:-}" =~ ^[0-9]+$ ]]; then
  processes=$1
  shift
else
  gpus=$(command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
  processes=${gpus:-0}
  [ "$processes" -gt 0 ] || processes=2
fi
if [ "$processes" -lt 1 ]; then
  echo "error: run_ddp.sh $processes: at least 1 process [flag-value]" >&2
  exit 2
fi
restarts=${MAX_RESTARTS:-0}
if ! [[ "$restarts" =~ ^[0-9]+$ ]]; then
  echo "error: MAX_RESTARTS=$restarts: must be a whole number, 0 = off [flag-value]" >&2
  exit 2
fi

# torchrun ends with 1 whatever its ranks end with, and would restart a run that was asked to stop.
# So a file exit_code in this folder decides, and prevents further attempts.
logs=$(mktemp -d) || exit 1
asked=
trap 'rm -rf "$logs"' EXIT
# shellcheck disable=SC2329 # the trap calls it
ask_to_stop() {
  asked=$2
  for launch in "$logs"/*/; do
    [ -d "$launch" ] || continue
    echo "$asked" >"$launch/exit_code" # until a rank that has saved says otherwise
    pkill "-$1" -P "$launcher" 2>/dev/null && return
  done
  # Without that folder no rank can know of the stop. It may be made at this very moment, and ranks
  # ignore the signal until they have loaded: only the end of the launcher stops them for certain.
  kill -TERM "$launcher" 2>/dev/null
}

# PyTorch takes seconds to load, in which a silent terminal looks as if nothing happened.
case " $* " in *" -h "* | *" --help"* | *" --print"*) ;; *)
  [ ! -t 2 ] || echo "Starting $processes processes (PyTorch takes a few seconds to load) ..." >&2 ;;
esac

# A session of its own keeps the terminal's Ctrl-C from torchrun, which would end with a traceback.
# In Python, because macOS does not have the command setsid.
detached='import os, sys; os.setsid(); os.execv(sys.argv[1], sys.argv[1:])'
"$python" -c "$detached" "$python" "$here/launch.py" --standalone \
  --nproc_per_node="$processes" --max_restarts="$restarts" --log_dir="$logs" \
  "$here/train_ddp.py" "$@" &
launcher=$!
trap 'ask_to_stop TERM 143' TERM HUP # HUP: the terminal was closed
trap 'ask_to_stop INT 130' INT # the second of them ends the ranks at once
while kill -0 "$launcher" 2>/dev/null; do
  wait "$launcher"
done
wait "$launcher" # once more: a signal may have cut the last one short
code=$?
if [ -n "$asked" ] && ! compgen -G "$logs/*/" >/dev/null; then
  echo "Stopped before the first step, nothing to save. To resume, rerun the same command."
fi
if [ "$code" -ne 0 ]; then
  said=$(cat "$logs"/*/exit_code 2>/dev/null)
  [[ "$said" =~ ^[0-9]+$ ]] || said=${asked:-$code} # no rank has said anything
  code=$said
fi
exit "$code"
