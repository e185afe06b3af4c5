cat /etc/made-by made-by
stat -c %U made-by /home/dev/mine
sudo id -un
