#!/bin/busybox sh
# Process 1 of an emulated machine, twice: in the first file system it loads modules and mounts the root image, then it
# runs itself again there, unpacks the payload (a tar on the second disk), runs the payload's run.sh, writes what that
# left in out/, with its exit status, to the third disk as a tar, and turns the machine off.
export PATH=/usr/local/bin:/usr/bin:/usr/sbin:/run/busybox HOME=/root LANG=C.UTF-8
B=/bin/busybox

if [ ! -d /guest ]; then
  $B mount -t proc proc /proc
  $B mount -t sysfs sysfs /sys
  $B mount -t devtmpfs devtmpfs /dev
  for module in /modules/*.ko; do
    [ ! -e "$module" ] || $B insmod "$module" || echo "cannot load $module"
  done
  tries=0
  while [ ! -b /dev/vdc ] && [ $tries -lt 200 ]; do
    $B usleep 50000
    tries=$((tries + 1))
  done
  $B mount -t ext4 -o rw,noatime /dev/vda /root || $B poweroff -f
  for name in proc sys dev; do $B mount --move /$name /root/$name; done
  $B cp /init /root/init
  exec $B switch_root /root /bin/busybox sh /init
fi

$B mount -t tmpfs tmpfs /tmp
$B mount -t tmpfs tmpfs /run
$B mkdir -p /dev/shm /run/busybox
$B mount -t tmpfs tmpfs /dev/shm
$B mount -t cgroup2 cgroup2 /sys/fs/cgroup
$B --install -s /run/busybox
ip link set lo up
# As Debian's kernels have it anyway: what is bound must stay although the kernel moves pages to those who use them.
echo 1 >/proc/sys/kernel/numa_balancing
cd /guest && tar xf /dev/vdb && mkdir -p out
echo "guest up after $(cut -d' ' -f1 /proc/uptime) s: Linux $(uname -r) $(uname -m)"
sh ./run.sh
echo $? >out/status
echo "guest done after $(cut -d' ' -f1 /proc/uptime) s"
tar cf /dev/vdc -C /guest/out .
sync
poweroff -f
