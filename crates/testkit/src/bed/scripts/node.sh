# The first process of a node: sets up the view of a separate machine, then reaps orphans until the node is powered off.
#   node.sh NODE BIN HOSTNAME BOOT_ID CGROUPS
# CGROUPS is "v2", or the v1 hierarchies as "cpu,cpuacct memory name=systemd" (one word per mount).
# Runs inside the node's namespaces, with the bed's file system.
node=$1 bin=$2 name=$3 boot_id=$4 cgroups=$5

# Prints one sentence to the log, which the waiting process reads.
die() {
  echo "node $name: $1" >&2
  exit 1
}

# The node's disk: the host's files, with all changes kept apart.
root=$node/root
mount -t overlay overlay -o "lowerdir=/,upperdir=$node/disk/upper,workdir=$node/disk/work" "$root" ||
  die "overlayfs on $node does not work; put TMPDIR on ext4, xfs or tmpfs, or load the kernel module overlay"
cd "$root" || exit 1
[ -e usr/bin ] || die "/usr is a separate file system, which a node would not see: put it on the root file system"

mount -t proc proc proc || die "/proc cannot be mounted"
mount -t sysfs sysfs sys || die "/sys cannot be mounted"
mount -t tmpfs -o mode=755 tmpfs run || die "tmpfs cannot be mounted"
mount -t tmpfs -o mode=1777 tmpfs tmp || die "/tmp cannot be mounted"
mkdir -p var/lib var/log bed
mount --bind "$node/disk/lib" var/lib || die "/var/lib cannot be mounted"
mount --bind "$node/disk/log" var/log || die "/var/log cannot be mounted"
[ -L var/run ] || mount --bind run var/run
mount --bind "$node" bed || die "/bed cannot be mounted"
# Read-only: these are the host's files, shared by all beds.
mount --bind "$bin" bed/bin && mount -o remount,bind,ro bed/bin ||
  die "/bed/bin cannot be mounted"
mkdir -p run/lock

# The node has its own devices: a test may add some, which the host must not see.
mount -t tmpfs -o mode=755 tmpfs dev || die "/dev cannot be mounted"
for device in null zero full random urandom tty kmsg fuse; do
  [ ! -e "/dev/$device" ] || cp -a "/dev/$device" dev/
done
mkdir dev/pts dev/shm dev/mqueue
mount -t devpts -o newinstance,ptmxmode=0666,mode=620,gid=5 devpts dev/pts || die "/dev/pts cannot be mounted"
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd
ln -s fd/0 dev/stdin
ln -s fd/1 dev/stdout
ln -s fd/2 dev/stderr
mount -t tmpfs -o mode=1777 tmpfs dev/shm
mount -t mqueue mqueue dev/mqueue

# The cgroup namespace makes the node's cgroup the root of what is mounted here.
case $cgroups in
v2) mount -t cgroup2 cgroup2 sys/fs/cgroup || die "the kernel has no cgroup v2" ;;
*)
  mount -t tmpfs -o mode=755 tmpfs sys/fs/cgroup
  for hierarchy in $cgroups; do
    options=$hierarchy folder=${hierarchy#name=}
    [ "$folder" = "$hierarchy" ] || options=none,$hierarchy
    mkdir "sys/fs/cgroup/$folder"
    mount -t cgroup -o "$options" cgroup "sys/fs/cgroup/$folder" || die "cgroup v1 $hierarchy cannot be mounted"
  done
  mkdir sys/fs/cgroup/unified
  mount -t cgroup2 cgroup2 sys/fs/cgroup/unified || rmdir sys/fs/cgroup/unified
  ;;
esac
mount -t bpf bpf sys/fs/bpf 2>/dev/null

# Kubelet sets these for the whole host unless they already have the right value. Here it finds them set.
while read -r key value; do
  [ -e "proc/sys/$key" ] || continue
  echo "$value" >"$node/sysctl/$(echo "$key" | tr / .)"
  # Otherwise kubelet would change the host.
  mount --bind "$node/sysctl/$(echo "$key" | tr / .)" "proc/sys/$key" || die "$key cannot be hidden from kubelet"
done <<END
vm/overcommit_memory 1
vm/panic_on_oom 0
kernel/panic 10
kernel/panic_on_oops 1
kernel/keys/root_maxkeys 1000000
kernel/keys/root_maxbytes 25000000
kernel/random/boot_id $boot_id
END

hostname "$name"
echo "$name" >etc/hostname
[ -s "$node/machine-id" ] || tr -d - </proc/sys/kernel/random/uuid >"$node/machine-id"
rm -f etc/machine-id
cp "$node/machine-id" etc/machine-id
rm -f etc/resolv.conf
cp "$node/resolv.conf" etc/resolv.conf

pivot_root . . || die "pivot_root does not work on this machine's root file system"
umount -l .
cd /
mount --make-rshared /
>/bed/up || die "the node's disk cannot be written"

while :; do sleep 2147483647; done
