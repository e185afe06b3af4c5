const greeter = require('greeter')

require('http')
  .createServer((_, answer) => answer.end(greeter(process.env.NODE_ENV)))
  .listen(8125)
