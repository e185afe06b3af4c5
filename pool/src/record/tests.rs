use std::os::unix::fs::PermissionsExt;

use super::*;

fn no_notes(_: &str) -> Option<Lifetime> {
    None
}

fn record() -> Record {
    let template = library::fixtures::info();
    let boot = BootFiles {
        kernel: "/k".into(),
        initrd: "/i".into(),
        root: "/r".into(),
    };
    Record::new("boot", Arc::new(template), Some(boot), "0".repeat(32))
}

#[test]
fn a_record_reads_back_and_is_private() {
    let root = tempfile::tempdir().unwrap();
    let dir = SlotDir::new(root.path(), &SandboxId::from_random([7; 19]));
    dir.create().unwrap();
    let mut record = record();
    record.init.access_token = Some("secret".into());
    record.note = "the caller's".into();
    record.lifetime.set(5, 7);
    record.tap = Some(TapIndex(7));
    record.policy = Policy::internet();
    for kept in [
        Kept::Nobody,
        Kept::Running,
        Kept::Paused(PauseMode::Memory),
        Kept::Paused(PauseMode::FilesystemOnly),
    ] {
        record.kept = kept;
        record.vmm = ProcessName::of(std::process::id());
        dir.write(&record, Durability::Host).unwrap();
        assert_eq!(dir.read(no_notes).unwrap(), record);
    }
    assert!(record.vmm.unwrap().is_alive());
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&dir.path().join(RECORD)), 0o600);
    assert_eq!(mode(dir.path()), 0o700);
    dir.remove().unwrap();
    dir.remove().unwrap();
    assert!(matches!(dir.look(no_notes), Contents::Nothing));
}

#[test]
fn a_torn_record_is_replaced_by_that_of_the_pause_or_set_aside_with_its_files() {
    let root = tempfile::tempdir().unwrap();
    let sandboxes = root.path().join("sandboxes");
    let id = SandboxId::from_random([7; 19]);
    let dir = SlotDir::new(&sandboxes, &id);
    fs::create_dir_all(dir.pause()).unwrap();
    let mut record = record();
    record.kept = Kept::Paused(PauseMode::Memory);
    dir.write_pause(&record).unwrap();
    assert_eq!(dir.read(no_notes).unwrap(), record);
    dir.write(&record, Durability::Process).unwrap();
    fs::write(dir.path().join(RECORD), "").unwrap();
    match dir.look(no_notes) {
        Contents::Record(found) => assert_eq!(*found, record),
        other => panic!("{other:?}"),
    }
    // Both names are torn.
    fs::write(dir.pause().join(RECORD), "{").unwrap();
    match dir.look(no_notes) {
        Contents::Damaged(why) => assert!(why.contains("record.json: it is damaged"), "{why}"),
        other => panic!("{other:?}"),
    }
    let aside = dir.set_aside().unwrap();
    assert_eq!(aside, root.path().join(DAMAGED).join(id.as_str()));
    assert!(aside.join("pause").exists() && !dir.path().exists());
}

#[test]
fn records_of_another_version_are_refused() {
    let root = tempfile::tempdir().unwrap();
    let dir = SlotDir::new(root.path(), &SandboxId::from_random([7; 19]));
    dir.create().unwrap();
    let mut record = record();
    record.version = VERSION + 1;
    dir.write(&record, Durability::Process).unwrap();
    assert!(matches!(dir.look(no_notes), Contents::Later(_)));
    for torn in ["", "{}", "\0\0\0", "{\"version\": 3}"] {
        fs::write(dir.path().join(RECORD), torn).unwrap();
        assert!(matches!(dir.look(no_notes), Contents::Torn(_)), "{torn:?}");
        fs::create_dir_all(dir.pause()).unwrap();
        assert!(
            matches!(dir.look(no_notes), Contents::Damaged(_)),
            "{torn:?}"
        );
        fs::remove_dir(dir.pause()).unwrap();
    }
}

#[test]
fn a_record_of_version_1_gets_its_lifetime_from_its_note() {
    let root = tempfile::tempdir().unwrap();
    let dir = SlotDir::new(root.path(), &SandboxId::from_random([7; 19]));
    dir.create().unwrap();
    let mut wanted = record();
    wanted.kept = Kept::Running;
    let mut old = serde_json::to_value(&wanted).unwrap();
    let fields = old.as_object_mut().unwrap();
    fields.insert("version".into(), 1.into());
    fields.remove("lifetime");
    fields.remove("note");
    let write = |old: &serde_json::Value| fs::write(dir.path().join(RECORD), old.to_string());
    write(&old).unwrap();
    let read_note = |note: &str| {
        let mut lifetime = Lifetime::default();
        lifetime.set(0, note.parse().ok()?);
        Some(lifetime)
    };
    assert!(dir.read(read_note).is_err(), "no note");
    fs::write(dir.path().join(NOTE), "9").unwrap();
    wanted.note = "9".into();
    wanted.lifetime.set(0, 9);
    assert_eq!(dir.read(read_note).unwrap(), wanted);
    // The next write upgrades it to the current version.
    dir.write(&wanted, Durability::Process).unwrap();
    assert_eq!(dir.read(no_notes).unwrap(), wanted);
    write(&old).unwrap();
    fs::write(dir.path().join(NOTE), "something else").unwrap();
    assert!(dir.read(read_note).is_err(), "a note without a lifetime");
    // A warm slot has no note.
    old["kept"] = "nobody".into();
    write(&old).unwrap();
    assert_eq!(dir.read(no_notes).unwrap().kept, Kept::Nobody);
}

#[test]
fn a_deadline_moves_with_a_clock_that_was_set_since_its_record_was_written() {
    let root = tempfile::tempdir().unwrap();
    let dir = SlotDir::new(root.path(), &SandboxId::from_random([7; 19]));
    dir.create().unwrap();
    let mut lifetime = Lifetime::default();
    lifetime.set(1_000_000, 300);
    let (elapsed, day) = (400_000, 86_400_000);
    let mut record = record();
    record.set_lifetime(lifetime, 600_000);
    dir.write(&record, Durability::Process).unwrap();
    let end_at = |wall| {
        dir.read(no_notes)
            .unwrap()
            .lifetime_at(Reading { wall, elapsed })
            .end_at
    };
    assert_eq!(end_at(1_000_000), 1_300_000);
    assert_eq!(
        end_at(1_000_900),
        1_300_000,
        "two clocks are never read at one moment"
    );
    assert_eq!(end_at(1_000_000 + day), 1_300_000 + day);
    assert_eq!(end_at(1_000), 301_000);
    // A record of version 3 has no offset, and no later fields.
    let mut old = serde_json::to_value(&record).unwrap();
    old["version"] = 3.into();
    for later in ["clock_offset_ms", "defaults", "priority", "claim"] {
        old.as_object_mut().unwrap().remove(later);
    }
    fs::write(dir.path().join(RECORD), old.to_string()).unwrap();
    assert_eq!(end_at(1_000_000 + day), 1_300_000);
}

#[test]
fn a_process_of_the_same_id_is_another_one() {
    let mut name = ProcessName::of(std::process::id()).unwrap();
    assert!(name.is_alive());
    name.start_ticks += 1;
    assert!(!name.is_alive());
}
