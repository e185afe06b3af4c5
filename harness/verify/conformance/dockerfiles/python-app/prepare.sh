mkdir wheels
python3 -m zipfile -c wheels/greet-1.0-py3-none-any.whl greet greet-1.0.dist-info
rm -r greet greet-1.0.dist-info
