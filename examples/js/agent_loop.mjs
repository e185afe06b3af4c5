// The loop of an agent: run the model's code, return the error to the model, run its next answer.
// A fixed list replaces the model, so the program needs no model key and its output never changes.

import { Sandbox } from '@e2b/code-interpreter'

const TASK = 'the mean of the scores in scores.json'
const ANSWERS = [
  // The model has not read the file and assumes a list of numbers.
  "import json\nscores = json.load(open('scores.json'))\nsum(scores) / len(scores)",
  // The model has seen the error.
  "values = [entry['score'] for entry in scores]\nsum(values) / len(values)",
]

/** A real agent calls a model here. */
const model = (messages) => ANSWERS[messages.length - 1]

const sandbox = await Sandbox.create({ timeoutMs: 300_000 })
try {
  await sandbox.files.write('scores.json', '[{"name": "ann", "score": 3}, {"name": "bob", "score": 5}]')
  const messages = [TASK]
  let cell = await sandbox.runCode(model(messages))
  while (cell.error) {
    console.log('attempt', messages.length, 'failed:', cell.error.name)
    messages.push(cell.error.traceback)
    cell = await sandbox.runCode(model(messages))
  }
  console.log('attempt', messages.length, 'says', cell.text)
} finally {
  await sandbox.kill()
}

// Prints:
// attempt 1 failed: TypeError
// attempt 2 says 4.0
