# The first process of a bed. When it exits, the kernel kills all other processes and removes their mounts and
# interfaces.
#   init.sh FOLDER
folder=$1

# /proc is still the host's, so this is our PID as seen from outside.
read -r pid _ </proc/self/stat
mount -t proc proc /proc || exit 1
echo "$pid" >"$folder/init.pid.new" && mv "$folder/init.pid.new" "$folder/init.pid" || exit 1

# The pipe never carries data: cat exits when the owner closes it or is killed. Meanwhile the shell reaps orphans.
cat >/dev/null
