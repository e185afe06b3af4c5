find . -type f | sort | xargs stat -c '%n %U %a'
tool
