'use strict';
// Modules and types in cells. V8's REPL mode evaluates scripts, so import statements are rewritten to calls of
// `import()` relative to the working directory, and TypeScript types are removed.

const fs = require('node:fs');
const path = require('node:path');
const { createRequire } = require('node:module');
const { pathToFileURL } = require('node:url');

const here = () => createRequire(path.join(process.cwd(), 'cell.js'));

function require_(name) {
  return here()(name);
}
require_.resolve = (name, options) => here().resolve(name, options);

// The entry point of a package that exists only as an ES module.
function moduleOfPackage(name) {
  const parts = name.split('/');
  const depth = name.startsWith('@') ? 2 : 1;
  const [id, below] = [parts.slice(0, depth).join('/'), parts.slice(depth).join('/')];
  for (const dir of here().resolve.paths(name) ?? []) {
    const file = path.join(dir, id, 'package.json');
    if (!fs.existsSync(file)) continue;
    const { exports, module, main } = JSON.parse(fs.readFileSync(file, 'utf8'));
    let target = exports?.[below ? `./${below}` : '.'] ?? (below ? `./${below}` : exports);
    while (target && typeof target === 'object') target = target.node ?? target.import ?? target.default;
    return path.join(dir, id, target ?? module ?? main ?? 'index.js');
  }
  return null;
}

function locate(name) {
  if (/^(node|data|file|https?):/.test(name)) return name;
  if (/^\.{0,2}\//.test(name)) return pathToFileURL(path.resolve(name)).href;
  try {
    const found = here().resolve(name);
    return path.isAbsolute(found) ? pathToFileURL(found).href : found;
  } catch (error) {
    const found = moduleOfPackage(name);
    if (found === null) throw error;
    return pathToFileURL(found).href;
  }
}

Object.defineProperty(globalThis, '__import', { value: async (name) => import(locate(String(name))) });

const STATEMENT = /^([ \t]*)import\s+(?:([\w$*{}\s,]+?)\s+from\s*)?(['"])([^'"\n]+)\3[ \t]*;?/gm;

// Converts the names between `import` and `from` to declarations of constants.
function declarations(names, call) {
  const lines = [];
  const braces = names.match(/\{([^}]*)\}/);
  const outside = names.replace(/\{[^}]*\}/, '').split(',').map((part) => part.trim()).filter(Boolean);
  for (const part of outside) {
    const space = part.match(/^\*\s+as\s+([\w$]+)$/);
    lines.push(space ? `const ${space[1]} = await ${call};` : `const { default: ${part} } = await ${call};`);
  }
  if (braces) lines.push(`const {${braces[1].replace(/([\w$]+)\s+as\s+([\w$]+)/g, '$1: $2')}} = await ${call};`);
  // On one line, so that line numbers do not change.
  return lines.join(' ');
}

function rewriteImports(code) {
  return code
    .replace(STATEMENT, (_, indent, names, quote, name) => {
      const call = `__import(${JSON.stringify(name)})`;
      return indent + (names ? declarations(names, call) : `await ${call};`);
    })
    .replace(/(^|[^.\w$])import\s*\(/g, '$1__import(');
}

let typescript = null;
function stripTypes(code) {
  typescript ??= require('typescript');
  const { ScriptTarget, ModuleKind } = typescript;
  const compilerOptions = {
    target: ScriptTarget.ES2022,
    module: ModuleKind.ESNext,
    isolatedModules: true,
    // Keeps unused imports: a later cell may use them.
    preserveValueImports: true,
    importsNotUsedAsValues: 0,
  };
  return typescript.transpileModule(code, { compilerOptions }).outputText;
}

function rewrite(code, language) {
  let script = language === 'typescript' ? stripTypes(code) : code;
  if (/\bimport\b/.test(script)) script = rewriteImports(script);
  if (/^\s*export\b/m.test(script)) {
    script = script.replace(/^(\s*)export\s+\{\s*\};?/gm, '$1').replace(/^(\s*)export\s+(?:default\s+)?/gm, '$1');
  }
  return script;
}

module.exports = { require: require_, rewrite };
