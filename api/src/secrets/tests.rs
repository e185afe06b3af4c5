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
    let made = secrets
        .create("OpenAI", VALUE, labels.clone(), Vec::new(), 5)
        .unwrap();
    assert_eq!((made.name.as_str(), made.version), ("openai", 1));
    assert!(made.id.starts_with("sec_") && made.id.len() == 24);
    let taken = secrets.create("openai", "x", BTreeMap::new(), Vec::new(), 6);
    assert!(matches!(taken, Err(SecretError::Taken(name)) if name == "openai"));
    let updated = secrets
        .update("OPENAI", "second-canary", None, None, 7)
        .unwrap();
    assert_eq!((updated.version, &updated.metadata), (2, &labels));
    assert_eq!((updated.created_at_ms, updated.updated_at_ms), (5, 7));
    let again = open(state.path());
    assert_eq!(again.get(&made.id).unwrap(), updated);
    assert_eq!(again.list(), [updated]);
    assert_eq!(
        again.value("openai", "a.test").unwrap().expose(),
        "second-canary"
    );
    for path in files(state.path()) {
        let mode = fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{}", path.display());
        let text = String::from_utf8_lossy(&fs::read(&path).unwrap()).into_owned();
        assert!(!text.contains("canary"), "{}", path.display());
    }
    let shown = format!("{again:?} {:?}", again.value("openai", "a.test"));
    assert!(!shown.contains("canary"), "{shown}");
    again.delete("openai", 8).unwrap();
    assert!(matches!(
        again.delete("openai", 8),
        Err(SecretError::NotFound(_))
    ));
    assert!(matches!(
        again.value("openai", "a.test"),
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
    let one = first
        .create("one", VALUE, BTreeMap::new(), Vec::new(), 1)
        .unwrap();
    let two = first
        .create("two", VALUE, BTreeMap::new(), Vec::new(), 1)
        .unwrap();
    assert_eq!(with(&format!("{hex}\n")).unwrap().list().len(), 2);
    let wrong = with(&other).unwrap_err().to_string();
    assert!(
        wrong.contains("server.secrets_key") && wrong.contains('2'),
        "{wrong}"
    );
    // A command that only kills sandboxes has no key.
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
    let made = secrets
        .create("a", VALUE, BTreeMap::new(), Vec::new(), 1)
        .unwrap();
    let whole = fs::read(file_of(state.path(), &made.id)).unwrap();
    let dir = state.path().join(DIR);
    fs::write(dir.join("sec_x.json.new"), "{").unwrap();
    for length in [0, 1, whole.len() / 2, whole.len() - 1] {
        fs::write(dir.join("sec_torn.json"), &whole[..length]).unwrap();
        assert_eq!(open(state.path()).list().len(), 1);
    }
    // Under a name that is not its id.
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
    let made = secrets
        .create("a", VALUE, BTreeMap::new(), Vec::new(), 1)
        .unwrap();
    // A directory in place of the file: unlink(2) fails, for root too.
    let path = file_of(state.path(), &made.id);
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    assert!(matches!(secrets.delete("a", 2), Err(SecretError::Io(_))));
    assert_eq!(secrets.value("a", "a.test").unwrap().expose(), VALUE);
}

#[test]
fn values_of_secrets_are_overwritten_when_they_are_dropped() {
    // Wrong types do not compile. Freed memory cannot be checked in a test.
    fn check<T: zeroize::ZeroizeOnDrop>(_: &T) {}
    let Value(text) = Value::of_test("v");
    check(&text);
    let dir = tempfile::tempdir().unwrap();
    let secrets = open(dir.path());
    check(&secrets.open_text(&secrets.seal_text("t").unwrap()).unwrap());
}

#[test]
fn a_secret_goes_to_its_hosts_only_and_they_cannot_be_changed_in_its_file() {
    let state = tempfile::tempdir().unwrap();
    let secrets = open(state.path());
    let list = |hosts: &[&str]| {
        hosts
            .iter()
            .map(|host| (*host).to_owned())
            .collect::<Vec<_>>()
    };
    for wrong in [
        list(&["*"]),
        list(&["a b"]),
        list(&["192.0.2.1"]),
        vec!["a.test".into(); 65],
    ] {
        let refused = secrets.create("key", VALUE, BTreeMap::new(), wrong.clone(), 1);
        assert!(matches!(refused, Err(SecretError::Invalid(_))), "{wrong:?}");
    }
    let hosts = list(&["*.B.test", "a.test.", "a.test"]);
    let made = secrets
        .create("key", VALUE, BTreeMap::new(), hosts, 1)
        .unwrap();
    assert_eq!(made.hosts, ["*.b.test", "a.test"]);
    for (host, is_allowed) in [
        ("a.test", true),
        ("x.b.test", true),
        ("*.b.test", true),
        ("*.c.b.test", true),
        ("b.test", false),
        ("x.a.test", false),
        ("*.a.test", false),
        ("*.test", false),
        ("evil.test", false),
    ] {
        assert_eq!(
            secrets.check_host("key", host).is_ok(),
            is_allowed,
            "{host}"
        );
        let value = secrets.value("key", host);
        assert_eq!(value.is_ok(), is_allowed, "{host}");
        if let Err(why) = value {
            let why = why.to_string();
            assert!(why.contains("\"key\"") && why.contains(host), "{why}");
        }
    }
    assert!(secrets.check_host("unknown", "evil.test").is_ok());
    // Hosts are kept unless new ones are set. An empty list means any.
    assert_eq!(
        secrets.update("key", VALUE, None, None, 2).unwrap().hosts,
        made.hosts
    );
    let path = file_of(state.path(), &made.id);
    let text = fs::read_to_string(&path).unwrap();
    fs::write(
        &path,
        text.replace("\"a.test\"", "\"evil.test\"")
            .replace("*.b.test", "*.z.test"),
    )
    .unwrap();
    assert!(matches!(
        Secrets::open(state.path(), &KeySource::Generated),
        Err(OpenError::WrongKey { .. })
    ));
    fs::write(&path, text).unwrap();
    let secrets = open(state.path());
    assert_eq!(
        secrets
            .update("key", VALUE, None, Some(Vec::new()), 3)
            .unwrap()
            .hosts,
        [""; 0]
    );
    assert!(secrets.value("key", "evil.test").is_ok());
}
