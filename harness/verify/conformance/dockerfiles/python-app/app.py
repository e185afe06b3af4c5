import greet

print(greet.hello("python"))
