'use strict';
// New random state in a process whose memory was copied. Clones of a snapshot wake up with the same
// generators; the kernel's is another one in each clone by then, and from it the others are seeded.

const crypto = require('node:crypto');
const fs = require('node:fs');
const path = require('node:path');

// Random bytes that Node keeps for `randomInt`, and how many one number takes.
const KEPT = 6 * 1024;
const TAKEN = 6;

let intsWereDrawn = false;
const { randomInt } = crypto;
// xoshiro128**, by Blackman and Vigna: four words that are not all zero.
let [a, b, c, d] = [1, 2, 3, 4];

function next() {
  const r = Math.imul(b, 5);
  const result = Math.imul((r << 7) | (r >>> 25), 9) >>> 0;
  const t = b << 9;
  c ^= a;
  d ^= b;
  b ^= c;
  a ^= d;
  c ^= t;
  d = (d << 11) | (d >>> 21);
  return result;
}

// V8's own Math.random cannot be seeded in a running context.
function random() {
  return ((next() >>> 5) * 0x4000000 + (next() >>> 6)) / 0x20000000000000;
}

function prepare() {
  // OpenSSL's generators: nothing of theirs is left to be seeded.
  process.dlopen({ exports: {} }, path.join(__dirname, '..', 'random.so'));
  Object.defineProperty(random, 'name', { value: 'random' });
  Math.random = random;
  // Without its cache of random bytes, which would be the same in clones of a sandbox that has used it.
  const uuid = crypto.randomUUID;
  crypto.randomUUID = () => uuid({ disableEntropyCache: true });
  Object.defineProperty(crypto.webcrypto, 'randomUUID', { value: crypto.randomUUID, configurable: true });
  crypto.randomInt = (...bounds) => {
    intsWereDrawn = true;
    return randomInt(...bounds);
  };
  Object.defineProperty(crypto.randomInt, 'name', { value: 'randomInt' });
  // Node 18 has it only as a module.
  globalThis.crypto ??= crypto.webcrypto;
  // For those who import the functions by name.
  require('node:module').syncBuiltinESMExports();
  reseed();
}

function reseed() {
  const seed = new Int32Array(4);
  const urandom = fs.openSync('/dev/urandom');
  fs.readSync(urandom, seed);
  fs.closeSync(urandom);
  [a, b, c, d] = seed;
  a |= 1;
  // What is left of bytes that were drawn before is used up.
  for (let left = intsWereDrawn ? KEPT : 0; left > 0; left -= TAKEN) randomInt(2);
  intsWereDrawn = false;
}

module.exports = { prepare, reseed };
