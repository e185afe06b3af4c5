pwd
python app.py
