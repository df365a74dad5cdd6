# Runs a program inside a bed or a node.
#   enter.sh TARGET BUSYBOX MACHINE_PROC PIDFILE CGROUP... -- PROGRAM ARGUMENT...
# TARGET's namespaces are entered; BUSYBOX, MACHINE_PROC and PIDFILE are paths as seen from in there.
target=$1 busybox=$2 proc=$3 pidfile=$4
shift 4
# Before the namespaces are entered: from inside a cgroup namespace one may not reach out to pull oneself in.
while [ "$1" != -- ]; do
  echo 0 >"$1/cgroup.procs" || exit 125
  shift
done
shift
# The program's process knows its name in its own pid namespace only; the machine's /proc tells the one outside.
exec nsenter --target "$target" --mount --net --pid --cgroup --uts --ipc -- "$busybox" sh -c '
  read -r pid _ <"$1/self/stat"
  echo "$pid" >"$2.new" && '"'$busybox'"' mv "$2.new" "$2" || exit 125
  shift 2
  exec "$@"' sh "$proc" "$pidfile" "$@"
