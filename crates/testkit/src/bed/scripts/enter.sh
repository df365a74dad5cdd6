# Runs a program inside a bed or a node.
#   enter.sh TARGET CGROUP... -- PROGRAM ARGUMENT...
# TARGET's namespaces are entered; PROGRAM is a path as seen from in there. The program is our only child.
target=$1
shift
# Before the namespaces are entered: from inside a cgroup namespace one may not reach out to pull oneself in.
while [ "$1" != -- ]; do
  echo 0 >"$1/cgroup.procs" || exit 125
  shift
done
shift
exec nsenter --target "$target" --mount --net --pid --cgroup --uts --ipc -- "$@"
