'use strict';
// Reseeds generators in a cloned process. Clones of a snapshot resume with equal generators, except that of the kernel,
// from which the others are seeded.

const crypto = require('node:crypto');
const fs = require('node:fs');
const path = require('node:path');

// Size of the cache of random bytes that Node keeps for `randomInt`, and bytes per number.
const KEPT = 6 * 1024;
const TAKEN = 6;

let intsWereDrawn = false;
const { randomInt } = crypto;
// xoshiro128** by Blackman and Vigna. The state is four words that must not all be zero.
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

// Replaces Math.random, because V8's generator cannot be reseeded in a running context.
function random() {
  return ((next() >>> 5) * 0x4000000 + (next() >>> 6)) / 0x20000000000000;
}

function prepare() {
  // Makes OpenSSL's generators read from the kernel, so that they need no reseeding.
  process.dlopen({ exports: {} }, path.join(__dirname, '..', 'random.so'));
  Object.defineProperty(random, 'name', { value: 'random' });
  Math.random = random;
  // Disables the cache of random bytes, which would be equal in clones of a sandbox that has used it.
  const uuid = crypto.randomUUID;
  crypto.randomUUID = () => uuid({ disableEntropyCache: true });
  Object.defineProperty(crypto.webcrypto, 'randomUUID', { value: crypto.randomUUID, configurable: true });
  crypto.randomInt = (...bounds) => {
    intsWereDrawn = true;
    return randomInt(...bounds);
  };
  Object.defineProperty(crypto.randomInt, 'name', { value: 'randomInt' });
  // Node 18 has `crypto` only as a module.
  globalThis.crypto ??= crypto.webcrypto;
  // Updates the named exports of the module.
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
  // Discards random bytes that were cached before.
  for (let left = intsWereDrawn ? KEPT : 0; left > 0; left -= TAKEN) randomInt(2);
  intsWereDrawn = false;
}

module.exports = { prepare, reseed };
