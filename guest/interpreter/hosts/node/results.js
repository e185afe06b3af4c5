'use strict';
// Converts values to result events.

const util = require('node:util');

// Keys of MIME types in results. Other types go into `extra` under their own names.
const KEYS = {
  'text/plain': 'text',
  'text/html': 'html',
  'text/markdown': 'markdown',
  'image/svg+xml': 'svg',
  'image/png': 'png',
  'image/jpeg': 'jpeg',
  'application/pdf': 'pdf',
  'text/latex': 'latex',
  'application/json': 'json',
  'application/javascript': 'javascript',
};
// Limit below the 64 MiB of a line on the control socket.
const MAX_TEXT = 16 << 20;

// Content by MIME type: content that the value provides, otherwise its text.
function bundle(value) {
  const own = value?.[Symbol.for('Jupyter.display')];
  if (typeof own === 'function') return own.call(value);
  const content = { 'text/plain': typeof value === 'string' ? value : util.inspect(value) };
  for (const [method, kind] of [['_toHtml', 'text/html'], ['_toSvg', 'image/svg+xml'], ['_toPng', 'image/png']]) {
    if (typeof value?.[method] === 'function') content[kind] = value[method]();
  }
  return content;
}

function event(value, main) {
  const fields = { type: 'result' };
  for (const [kind, content] of Object.entries(bundle(value))) {
    const fitting = typeof content === 'string' ? content.slice(0, MAX_TEXT) : content;
    if (KEYS[kind]) fields[KEYS[kind]] = fitting;
    else (fields.extra ??= {})[kind] = fitting;
  }
  fields.is_main_result = main;
  return fields;
}

// The frames of a stack that belong to user code.
function userStack(stack) {
  const lines = stack.split('\n');
  const host = lines.findIndex((line) => line.includes('node:inspector') || line.includes(__dirname));
  return (host < 0 ? lines : lines.slice(0, host)).join('\n');
}

function error(thrown) {
  if (!util.types.isNativeError(thrown)) {
    const value = typeof thrown === 'string' ? thrown : util.inspect(thrown);
    return { type: 'error', name: 'Uncaught', value, traceback: `Uncaught ${value}` };
  }
  return {
    type: 'error',
    name: String(thrown.name),
    value: String(thrown.message),
    traceback: userStack(String(thrown.stack ?? '')),
  };
}

module.exports = { event, error };
