# Runs a program inside a bed or a node.
#   enter.sh TARGET CGROUP... -- PROGRAM ARGUMENT...
# Enters TARGET's namespaces; PROGRAM is a path as seen from there. The program is this script's only child.
target=$1
shift
# Before the namespaces are entered: a process in a cgroup namespace cannot move itself into a cgroup outside of it.
while [ "$1" != -- ]; do
  echo 0 >"$1/cgroup.procs" || exit 125
  shift
done
shift
exec nsenter --target "$target" --mount --net --pid --cgroup --uts --ipc -- "$@"
