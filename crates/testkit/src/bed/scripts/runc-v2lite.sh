#!/bed/bin/busybox sh
# runc on a cgroup v2 without the controllers cpu, memory and pids: removes the limits, keeps the device rules.
# A quoted name that is followed by a colon is always a key: inside a string the quotes are escaped.
bundle=. verb= expect= edits=
for word in "$@"; do
  if [ -n "$expect" ]; then
    [ "$expect" != bundle ] || bundle=$word
    expect=
    continue
  fi
  case $word in
  --bundle | -b) expect=bundle ;;
  --bundle=*) bundle=${word#*=} ;;
  --root | --log | --log-format | --criu | --rootless) expect=skip ;;
  -*) ;;
  *) [ -n "$verb" ] || verb=$word ;;
  esac
done
case $verb in
update) exit 0 ;;
create | run)
  for key in cpu memory pids unified; do
    edits="$edits s/,\"$key\":{[^{}]*}//g;s/\"$key\":{[^{}]*},//g;s/\"$key\":{[^{}]*}//g;"
  done
  edits="$edits s/,\"hugepageLimits\":\[[^]]*\]//g;s/\"hugepageLimits\":\[[^]]*\],//g"
  /bed/bin/busybox sed -i "$edits" "$bundle/config.json" || exit 1
  ;;
esac
exec /bed/bin/runc "$@"
