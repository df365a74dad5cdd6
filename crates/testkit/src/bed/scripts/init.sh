# The first process of a bed. When it ends the kernel ends every other, and their mounts and interfaces go too.
#   init.sh FOLDER
folder=$1

# /proc is still the machine's: in there we are called what others outside call us.
read -r pid _ </proc/self/stat
mount -t proc proc /proc || exit 1
echo "$pid" >"$folder/init.pid.new" && mv "$folder/init.pid.new" "$folder/init.pid" || exit 1

# Nothing is ever sent. When the owner closes the pipe, or dies, this ends. Meanwhile the shell reaps orphans.
cat >/dev/null
