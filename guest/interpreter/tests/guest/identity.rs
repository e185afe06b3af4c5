//! State that a snapshot copies and a clone must replace.

use std::collections::BTreeSet;

use crate::{clone::Clone, main_text};

/// Each line of the output is a number from a different generator.
pub(crate) const PYTHON: &str = "
import random, uuid, ssl, secrets, tempfile, numpy, os, multiprocessing
import sympy.core.random as sympy_random
'\\n'.join(str(x) for x in [
    random.random(), uuid.uuid4(), uuid.uuid1(), ssl.RAND_bytes(16).hex(), secrets.token_hex(16),
    next(tempfile._get_candidate_names()), numpy.random.rand(), numpy.random.default_rng().random(),
    os.urandom(16).hex(), bytes(multiprocessing.current_process().authkey).hex(), sympy_random.rng.random(),
])";
const JAVASCRIPT: &str = "
[Math.random(), crypto.randomUUID(), require('crypto').randomBytes(16).toString('hex'),
 require('crypto').randomInt(2 ** 47), crypto.getRandomValues(new Uint32Array(4)).join(),
 require('crypto').generateKeyPairSync('ed25519').publicKey.export({type: 'spki', format: 'der'}).toString('hex')
].join('\\n')";

#[test]
fn interpreter_ten_clones_draw_different_numbers_everywhere() {
    let clones: Vec<Clone> = (0..10).map(|_| Clone::start()).collect();
    // The very first cells of each clone.
    assert_all_differ(&clones, "python", PYTHON, 11);
    assert_all_differ(&clones, "javascript", JAVASCRIPT, 6);
}

#[test]
fn interpreter_forks_draw_different_numbers_everywhere() {
    let parent = Clone::start();
    // Normal numbers are generated in pairs: both generators cache one.
    parent.python("import random, numpy; random.gauss(0, 1); numpy.random.randn()");
    let clones = parent.fork();
    let kept = "import random, numpy; '\\n'.join(str(x) for x in [random.gauss(0, 1), numpy.random.randn()])";
    assert_all_differ(&clones, "python", kept, 2);
    assert_all_differ(&clones, "python", PYTHON, 11);
    assert_all_differ(&clones, "javascript", JAVASCRIPT, 6);
}

/// Runs a cell that prints one line per generator in all clones, and asserts that all lines differ.
fn assert_all_differ(clones: &[Clone], language: &str, code: &str, generators: usize) {
    let drawn: Vec<String> = clones
        .iter()
        .map(|clone| main_text(&clone.cell(language, code)))
        .collect();
    for generator in 0..generators {
        let values: BTreeSet<&str> = drawn
            .iter()
            .map(|lines| {
                lines
                    .split("\\n")
                    .flat_map(str::lines)
                    .nth(generator)
                    .unwrap()
            })
            .collect();
        assert_eq!(
            values.len(),
            clones.len(),
            "generator {generator} of {language}: {values:?}"
        );
    }
}

#[test]
fn interpreter_time_and_names_are_the_clones_own() {
    let clone = Clone::start();
    let code = "import time, os, socket\n(time.time(), os.getcwd(), socket.gethostname())";
    let text = main_text(&clone.python(code));
    let (time, rest) = text.trim_start_matches('(').split_once(',').unwrap();
    let now = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap();
    let difference = now.as_secs_f64() - time.parse::<f64>().unwrap();
    assert!(difference.abs() < 60.0, "the clock is {difference} s off");
    assert_eq!(rest, " '/home/user', 'clone')");
    assert_eq!(main_text(&clone.cell("js", "process.cwd()")), "/home/user");
    let skew = format!("Math.abs(Date.now() - {}) < 60000", now.as_millis());
    assert_eq!(main_text(&clone.cell("js", &skew)), "true");
}
