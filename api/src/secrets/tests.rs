use std::os::unix::fs::PermissionsExt;

use super::*;

const VALUE: &str = "hunter2-canary";

fn open(state: &Path) -> Secrets {
    Secrets::open(state, &KeySource::Generated).unwrap()
}

fn files(state: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(state.join(DIR)).unwrap();
    entries.map(|entry| entry.unwrap().path()).collect()
}

fn file_of(state: &Path, id: &str) -> PathBuf {
    state.join(DIR).join(format!("{id}.json"))
}

#[test]
fn a_secret_is_read_back_by_the_next_server_and_its_value_is_in_no_file() {
    let state = tempfile::tempdir().unwrap();
    let secrets = open(state.path());
    let labels: BTreeMap<_, _> = [("team".to_owned(), "a".to_owned())].into();
    let made = secrets.create("OpenAI", VALUE, labels.clone(), 5).unwrap();
    assert_eq!((made.name.as_str(), made.version), ("openai", 1));
    assert!(made.id.starts_with("sec_") && made.id.len() == 24);
    let taken = secrets.create("openai", "x", BTreeMap::new(), 6);
    assert!(matches!(taken, Err(SecretError::Taken(name)) if name == "openai"));
    let updated = secrets.update("OPENAI", "second-canary", None, 7).unwrap();
    assert_eq!((updated.version, &updated.metadata), (2, &labels));
    assert_eq!((updated.created_at_ms, updated.updated_at_ms), (5, 7));
    let again = open(state.path());
    assert_eq!(again.get(&made.id).unwrap(), updated);
    assert_eq!(again.list(), [updated]);
    assert_eq!(again.value("openai").unwrap().expose(), "second-canary");
    for path in files(state.path()) {
        let mode = fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{}", path.display());
        let text = String::from_utf8_lossy(&fs::read(&path).unwrap()).into_owned();
        assert!(!text.contains("canary"), "{}", path.display());
    }
    let shown = format!("{again:?} {:?}", again.value("openai"));
    assert!(!shown.contains("canary"), "{shown}");
    again.delete("openai", 8).unwrap();
    assert!(matches!(
        again.delete("openai", 8),
        Err(SecretError::NotFound(_))
    ));
    assert!(matches!(
        again.value("openai"),
        Err(SecretError::NotFound(_))
    ));
    assert!(open(state.path()).list().is_empty());
}

#[test]
fn a_wrong_key_is_an_error_and_a_damaged_file_is_not() {
    let state = tempfile::tempdir().unwrap();
    let key = state.path().join("key");
    let with = |text: &str| {
        fs::write(&key, text).unwrap();
        fs::set_permissions(&key, fs::Permissions::from_mode(0o600)).unwrap();
        Secrets::open(state.path(), &KeySource::File(key.clone()))
    };
    let (hex, other) = ("ab".repeat(32), "cd".repeat(32));
    let first = with(&hex).unwrap();
    let one = first.create("one", VALUE, BTreeMap::new(), 1).unwrap();
    let two = first.create("two", VALUE, BTreeMap::new(), 1).unwrap();
    assert_eq!(with(&format!("{hex}\n")).unwrap().list().len(), 2);
    let wrong = with(&other).unwrap_err().to_string();
    assert!(
        wrong.contains("--secrets-key") && wrong.contains('2'),
        "{wrong}"
    );
    // A command that only ends sandboxes has no key.
    let unused = Secrets::open(state.path(), &KeySource::Unused).unwrap();
    assert!(unused.list().is_empty() && with(&hex).unwrap().list().len() == 2);
    for malformed in ["", "ab", &"zz".repeat(32)] {
        let why = with(malformed).unwrap_err();
        assert!(
            matches!(why, OpenError::Key(KeyError::Malformed(_))),
            "{why}"
        );
    }
    // The value of one secret in the file of another.
    let (a, b) = (
        file_of(state.path(), &one.id),
        file_of(state.path(), &two.id),
    );
    let read = |path: &Path| -> serde_json::Value {
        serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
    };
    let mut swapped = read(&b);
    for part in ["nonce", "sealed"] {
        swapped[part] = read(&a)[part].clone();
    }
    fs::write(&b, swapped.to_string()).unwrap();
    let left = with(&hex).unwrap();
    assert_eq!(left.list(), [one]);
    assert!(b.exists());
    fs::set_permissions(&key, fs::Permissions::from_mode(0o640)).unwrap();
    let open = Secrets::open(state.path(), &KeySource::File(key.clone())).unwrap_err();
    assert!(matches!(
        open,
        OpenError::Key(KeyError::Open { mode: 0o640, .. })
    ));
}

#[test]
fn torn_and_foreign_files_are_left_alone_and_drafts_removed() {
    let state = tempfile::tempdir().unwrap();
    let secrets = open(state.path());
    let made = secrets.create("a", VALUE, BTreeMap::new(), 1).unwrap();
    let whole = fs::read(file_of(state.path(), &made.id)).unwrap();
    let dir = state.path().join(DIR);
    fs::write(dir.join("sec_x.json.new"), "{").unwrap();
    for length in [0, 1, whole.len() / 2, whole.len() - 1] {
        fs::write(dir.join("sec_torn.json"), &whole[..length]).unwrap();
        assert_eq!(open(state.path()).list().len(), 1);
    }
    // Under another name than its id.
    fs::write(dir.join("sec_torn.json"), &whole).unwrap();
    let later = String::from_utf8(whole)
        .unwrap()
        .replace("\"format\":1", "\"format\":2");
    fs::write(dir.join("sec_later.json"), later).unwrap();
    assert_eq!(open(state.path()).list().len(), 1);
    assert!(dir.join("sec_torn.json").exists() && !dir.join("sec_x.json.new").exists());
}

#[test]
fn a_deletion_that_the_disk_refuses_keeps_the_secret() {
    let state = tempfile::tempdir().unwrap();
    let secrets = open(state.path());
    let made = secrets.create("a", VALUE, BTreeMap::new(), 1).unwrap();
    // A directory in place of the file: unlink(2) fails, for root too.
    let path = file_of(state.path(), &made.id);
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    assert!(matches!(secrets.delete("a", 2), Err(SecretError::Io(_))));
    assert_eq!(secrets.value("a").unwrap().expose(), VALUE);
}
