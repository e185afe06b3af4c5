# Adds the account $1. Without shadow's or busybox's program for it, the account files are extended.
if command -v useradd >/dev/null; then
    exec useradd --create-home --shell /bin/bash "$1"
fi
if command -v adduser >/dev/null; then
    exec adduser -D -s /bin/bash "$1"
fi
if grep -q "^$1:" /etc/group; then
    echo "group $1 exists already" >&2
    exit 9
fi
set -e
number=1000
while cut -d: -f3 /etc/passwd /etc/group | grep -qx "$number"; do
    number=$((number + 1))
done
echo "$1:x:$number:" >>/etc/group
echo "$1:x:$number:$number::/home/$1:/bin/bash" >>/etc/passwd
if [ -f /etc/shadow ]; then
    echo "$1:!:19723:0:99999:7:::" >>/etc/shadow
fi
mkdir -p "/home/$1"
chown "$number:$number" "/home/$1"
