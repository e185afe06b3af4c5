echo page > index.html
tar -czf site.tar.gz index.html
rm index.html
