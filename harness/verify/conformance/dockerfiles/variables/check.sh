pwd
cat out
