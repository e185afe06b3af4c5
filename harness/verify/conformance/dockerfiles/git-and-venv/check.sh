git log --format=%s
git status --short
cat prefix
