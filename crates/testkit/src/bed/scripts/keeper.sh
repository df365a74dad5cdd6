# Keeps one bed: starts its first process, waits for its end however it comes, and removes what the kernel leaves.
#   keeper.sh FOLDER NAME BUSYBOX CGROUP_ROOT...
# Standard input is a pipe; the bed's owner holds the other end. It survives its owner, or who would tidy up?
folder=$1 name=$2 busybox=$3
shift 3

# Held by everything that descends from here: a bed is alive exactly as long as its lock is taken.
exec 9>"$folder/lock"
flock 9 || exit 1

unshare --mount --net --pid --fork --kill-child --propagation private \
  "$busybox" sh "$folder/init.sh" "$folder"

# The processes went with their pid namespace, mounts and interfaces with theirs. Cgroups and files are left.
for root in "$@"; do
  tries=0
  while [ -d "$root/$name" ] && [ "$tries" -lt 200 ]; do
    "$busybox" find "$root/$name" -depth -type d -exec "$busybox" rmdir {} \; 2>/dev/null
    # A process that was killed a moment ago may still be on its way out.
    [ ! -d "$root/$name" ] || "$busybox" sleep 0.02
    tries=$((tries + 1))
  done
done
"$busybox" rm -rf "$folder"
