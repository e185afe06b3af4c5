module.exports = (name) => `hello ${name}\n`
