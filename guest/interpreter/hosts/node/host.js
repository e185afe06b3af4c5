'use strict';
// Host of JavaScript and TypeScript contexts: reads cells from descriptor 3, a socket, and responds there. The
// server's `message` module describes the messages.
//
// Cells are evaluated in V8's REPL mode, through an inspector session of this process with itself. It supports
// top-level await, redeclaration in later cells, and the value of the last expression.

const inspector = require('node:inspector');
const net = require('node:net');
const vm = require('node:vm');
const modules = require('./modules.js');
const results = require('./results.js');
const seeds = require('./seeds.js');

const language = process.argv[2];
const RUN = Symbol.for('cube.run');
const TAKE = Symbol.for('cube.take');

const session = new inspector.Session();
session.connect();

// Lines to send to the server, collected so that a short cell takes one write.
let pending = [];
let socket = null;
function push(event) {
  pending.push(JSON.stringify(event));
}
function flush() {
  const lines = pending;
  pending = [];
  if (socket && lines.length > 0) {
    socket.write(lines.join('\n') + '\n');
  }
}

// The value of an object that the inspector describes.
function take(remote) {
  if (remote.objectId === undefined) {
    if (remote.unserializableValue === undefined) return remote.value;
    const text = remote.unserializableValue;
    return remote.type === 'bigint' ? BigInt(text.slice(0, -1)) : Number(text);
  }
  session.post('Runtime.callFunctionOn', {
    objectId: remote.objectId,
    functionDeclaration: 'function (value) { globalThis[Symbol.for("cube.take")](value); }',
    arguments: [{ objectId: remote.objectId }],
  });
  session.post('Runtime.releaseObject', { objectId: remote.objectId });
  return taken;
}
let taken;
Object.defineProperty(globalThis, TAKE, { value: (value) => { taken = value; } });

// The running cell: a function that stops it while it waits.
let stop = null;
process.on('SIGINT', () => stop?.(interrupted()));
// Errors outside of a cell must not end the context.
process.on('uncaughtException', (error) => console.error(error));
process.on('unhandledRejection', (error) => console.error(error));

function interrupted() {
  return Object.assign(new Error('the execution was interrupted'), { name: 'Interrupted', stack: '' });
}

function evaluate(code) {
  return new Promise((resolve, reject) => {
    stop = reject;
    const expression = code;
    const options = { expression, replMode: true, awaitPromise: true, userGesture: true };
    const begin = () =>
      session.post('Runtime.evaluate', options, (failure, answer) => {
        if (failure) reject(failure);
        else if (answer.exceptionDetails) reject(take(answer.exceptionDetails.exception));
        else resolve(take(answer.result));
      });
    Object.defineProperty(globalThis, RUN, { value: begin, configurable: true });
    try {
      // In here, SIGINT ends even a loop that never returns to the event loop.
      vm.runInThisContext('globalThis[Symbol.for("cube.run")]()', { breakOnSigint: true });
    } catch (error) {
      reject(error?.code === 'ERR_SCRIPT_EXECUTION_INTERRUPTED' ? interrupted() : error);
    }
  }).finally(() => { stop = null; });
}

async function runCell(number, code) {
  try {
    const value = await evaluate(`${modules.rewrite(code, language)}\n//# sourceURL=cell-${number}.js`);
    if (value !== undefined) push(results.event(value, true));
  } catch (error) {
    push(results.error(error));
  }
}

// Sets variables. Returns a function that restores their previous values.
function setEnvironment(variables) {
  const before = {};
  for (const [name, value] of Object.entries(variables)) {
    before[name] = process.env[name];
    process.env[name] = value;
  }
  return () => {
    for (const [name, value] of Object.entries(before)) {
      if (value === undefined) delete process.env[name];
      else process.env[name] = value;
    }
  };
}

let base = {};
async function handle(request) {
  if (request.seed) seeds.reseed();
  if (request.base) {
    for (const name of Object.keys(base)) delete process.env[name];
    setEnvironment(request.base);
    base = request.base;
  }
  const undo = request.env ? setEnvironment(request.env) : null;
  try {
    await runCell(request.n, request.code);
  } finally {
    undo?.();
    push({ done: true });
    flush();
  }
}

globalThis.require = modules.require;
globalThis.display = (value) => {
  push(results.event(value, false));
  flush();
};

async function main() {
  seeds.prepare();
  if (process.argv.includes('--warm')) {
    const typed = ['{ const n: number = 1; n }', '{ enum E { A } interface I { a: string } }'];
    for (const code of [...(language === 'typescript' ? typed : []), '1+1', '{ const a = { b: [1] }; a }', 'await 1', 'throw new Error("x")', 'console.log("")', '1+1']) {
      await runCell(1, code);
    }
    pending = [];
    globalThis.gc?.();
  }
  socket = new net.Socket({ fd: 3, readable: true, writable: true });
  let input = '';
  let last = Promise.resolve();
  socket.setEncoding('utf8');
  socket.on('data', (piece) => {
    input += piece;
    const lines = input.split('\n');
    input = lines.pop();
    for (const line of lines) {
      const request = JSON.parse(line);
      // Between two turns Node has a handler for the signal; while a script begins or ends, it would end the process.
      if (!request.interrupt) last = last.then(() => handle(request));
      else if (stop) process.kill(0, 'SIGINT');
    }
  });
  socket.on('close', () => process.exit());
  push({ ready: true });
  flush();
}

main();
