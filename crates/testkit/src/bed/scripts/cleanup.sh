# Starts the first process of a bed, waits for its end, and removes what the kernel leaves behind.
#   cleanup.sh FOLDER NAME BUSYBOX CGROUP_ROOT...
# Standard input is a pipe; the bed's owner holds the other end. This process outlives its owner, to clean up after it.
folder=$1 name=$2 busybox=$3
shift 3

# All descendants hold the lock: a bed is alive exactly as long as its lock is taken.
exec 9>"$folder/lock"
flock 9 || exit 1

unshare --mount --net --pid --fork --kill-child --propagation private \
  "$busybox" sh "$folder/init.sh" "$folder"

# The kernel has removed the processes, mounts and interfaces with their namespaces. Cgroups and files are left.
for root in "$@"; do
  tries=0
  while [ -d "$root/$name" ] && [ "$tries" -lt 200 ]; do
    "$busybox" find "$root/$name" -depth -type d -exec "$busybox" rmdir {} \; 2>/dev/null
    # A process that was just killed may still be exiting.
    [ ! -d "$root/$name" ] || "$busybox" sleep 0.02
    tries=$((tries + 1))
  done
done
"$busybox" rm -rf "$folder"
