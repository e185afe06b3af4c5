one a
two 'b c'
cat /who
