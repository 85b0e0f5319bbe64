#!/usr/bin/env bash
# A Ray cluster of this one machine that slideformer-ray jobs can join. Run it with the package's environment active.
#
#   cluster_configs/single_workstation.sh start CONFIG.yaml                  a cluster whose object store holds this run
#   cluster_configs/single_workstation.sh submit CONFIG.yaml [KEY=VALUE]...  train in it, and show the job's log
#   cluster_configs/single_workstation.sh stop                               end every Ray process of this user
#
# Needs the extra `dashboard`. Everything listens on 127.0.0.1 alone: who reaches a Ray cluster can run any code on it.
set -euo pipefail

usage() {
  sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0" >&2
  exit 2
}

fail() {
  echo "$1" >&2
  exit 2
}

answers() { # whether something listens on that port of this machine
  (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null
}

start() {
  ! answers 6379 || fail "a Ray cluster runs here already (port 6379); end it with: $0 stop"
  # The plan says how large the store must be and how many CPUs the actors ask for, and refuses what does not fit;
  # ray_start_command knows the settings that the store needs.
  local plan command
  plan=$(slideformer-ray plan "$1" --json)
  command=$(python -c '
import json, os, sys
from slideformer_ray.memory.plasma_store import ray_start_command
plan = json.load(sys.stdin)
needed = 2 + plan["layout"]["num_optimizer_actors"] * plan["layout"]["threads_per_optimizer_actor"]
print(ray_start_command(plan["store_bytes"], max(os.cpu_count(), needed)))
' <<<"$plan")
  command+=" --disable-usage-stats"
  # `ray job stop` otherwise kills a job 3 s after its SIGTERM, which is too short for a large run to end cleanly.
  export RAY_JOB_STOP_WAIT_TIME_S=${RAY_JOB_STOP_WAIT_TIME_S:-600}
  echo "$command"
  eval "$command"
}

submit() {
  answers 8265 || fail "no Ray cluster answers at 127.0.0.1:8265; start one with: $0 start $1"
  # No --working-dir: the job runs on the machine that has the files. In a copy, relative outputs would be lost with it.
  local config
  config=$(realpath "$1")
  shift
  ray job submit --address=http://127.0.0.1:8265 -- slideformer-ray train "$config" placement.address=auto "$@"
}

case "${1:-}" in
  start) (($# == 2)) || usage; start "$2" ;;
  submit) (($# >= 2)) || usage; shift; submit "$@" ;;
  stop) (($# == 1)) || usage; ray stop ;;
  *) usage ;;
esac
