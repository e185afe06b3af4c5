// The loop of an agent: run what the model wrote, show it the error, run what it wrote next.
// The model is played by a list, so that the program needs no key and always does the same.

import { Sandbox } from '@e2b/code-interpreter'

const TASK = 'the mean of the scores in scores.json'
const ANSWERS = [
  // It has not looked at the file, and takes it for a list of numbers.
  "import json\nscores = json.load(open('scores.json'))\nsum(scores) / len(scores)",
  // It has seen the error.
  "values = [entry['score'] for entry in scores]\nsum(values) / len(values)",
]

/** An agent asks a model here. */
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
