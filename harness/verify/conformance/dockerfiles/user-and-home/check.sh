cat who
stat -c '%n %U:%G' note who ~/.config/made
id -un
