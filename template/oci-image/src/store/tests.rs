use std::time::Duration;

use super::*;

const KIB: usize = 1024;

fn blob(store: &Store, fill: u8, len: usize) -> Result<Lease, StoreError> {
    let bytes = vec![fill; len];
    store.put(Digest::of(&bytes), &bytes)
}

fn has(store: &Store, fill: u8, len: usize) -> bool {
    let digest = Digest::of(&vec![fill; len]);
    store.inner.dir.join(Object::Blob(digest).path()).exists()
}

#[test]
fn a_blob_appears_whole_or_not_at_all() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path(), 1 << 20).unwrap();
    let digest = Digest::of(b"whole");
    let mut draft = store.draft(5).unwrap();
    draft.append(b"who").unwrap();
    let error = draft.finish_blob(digest, 5).unwrap_err();
    assert!(matches!(error, StoreError::Size { .. }), "{error}");
    let mut draft = store.draft(5).unwrap();
    draft.append(b"whole").unwrap();
    let other = Digest::of(b"other");
    let error = draft.finish_blob(other, 5).unwrap_err();
    assert!(matches!(error, StoreError::Digest { .. }), "{error}");
    assert_eq!(fs::read_dir(dir.path().join("drafts")).unwrap().count(), 0);
    assert!(store.take(Object::Blob(digest)).is_none());
    assert!(store.held().leases.is_empty());
    let lease = store.put(digest, b"whole").unwrap();
    assert_eq!(fs::read(lease.path()).unwrap(), b"whole");
}

#[test]
fn a_store_has_one_owner_and_loses_the_drafts_of_a_killed_one() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path(), 1 << 20).unwrap();
    assert!(matches!(
        Store::open(dir.path(), 1),
        Err(StoreError::InUse(_))
    ));
    let mut draft = store.draft(1).unwrap();
    draft.append(b"x").unwrap();
    // As after SIGKILL: the lock is gone and the draft is left.
    std::mem::forget(draft);
    let Store { inner } = store;
    inner._lock.unlock().unwrap();
    let _store = Store::open(dir.path(), 1 << 20).unwrap();
    assert_eq!(fs::read_dir(dir.path().join("drafts")).unwrap().count(), 0);
}

#[test]
fn the_least_recently_used_files_make_room_and_leased_ones_stay() {
    let dir = tempfile::tempdir().unwrap();
    let quota = 64 * KIB as u64;
    let store = Store::open(dir.path(), quota).unwrap();
    let held = blob(&store, 1, 16 * KIB).unwrap();
    let old = SystemTime::now() - Duration::from_secs(3600);
    held.open().unwrap().set_modified(old).unwrap();
    for fill in [2, 3] {
        let lease = blob(&store, fill, 16 * KIB).unwrap();
        let age = Duration::from_secs(60 * u64::from(fill));
        let file = lease.open().unwrap();
        file.set_modified(SystemTime::now() - age).unwrap();
    }
    // Used again, so 3 is no longer the oldest.
    drop(blob(&store, 3, 16 * KIB).unwrap());
    drop(blob(&store, 4, 24 * KIB).unwrap());
    assert!(has(&store, 1, 16 * KIB) && has(&store, 3, 16 * KIB) && has(&store, 4, 24 * KIB));
    assert!(!has(&store, 2, 16 * KIB));
    let error = blob(&store, 5, 60 * KIB).unwrap_err();
    assert!(matches!(error, StoreError::Full { .. }), "{error}");
    drop(held);
    blob(&store, 5, 60 * KIB).unwrap();
    assert!(!has(&store, 1, 16 * KIB));
}

#[test]
fn the_reserve_of_the_disk_stays_free() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path(), u64::MAX).unwrap();
    let lease = blob(&store, 1, 16 * KIB).unwrap();
    drop(store.reserve(16 * KIB as u64).unwrap());
    let error = store.reserve(1 << 60).unwrap_err();
    assert!(matches!(error, StoreError::DiskFull { .. }), "{error}");
    drop((lease, store));
    let store = Store::open_with_reserve(dir.path(), u64::MAX, 1 << 60).unwrap();
    let error = store.reserve(1).unwrap_err();
    assert!(matches!(error, StoreError::DiskFull { .. }), "{error}");
    // No file was removed unnecessarily.
    assert!(has(&store, 1, 16 * KIB));
}

#[test]
fn drafts_together_never_exceed_the_quota() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path(), 64 * KIB as u64).unwrap();
    drop(blob(&store, 1, 16 * KIB).unwrap());
    // Reserved before the first byte. Nothing is written yet.
    let first = store.draft(40 * KIB as u64).unwrap();
    assert!(has(&store, 1, 16 * KIB));
    let error = store.draft(40 * KIB as u64).unwrap_err();
    assert!(matches!(error, StoreError::Full { .. }), "{error}");
    // No file was removed unnecessarily.
    assert!(has(&store, 1, 16 * KIB));
    let mut second = store.draft(24 * KIB as u64).unwrap();
    assert!(!has(&store, 1, 16 * KIB));
    // More than announced does not fit either.
    second.append(&vec![0; 24 * KIB]).unwrap();
    assert!(second.append(&[0]).is_err());
    drop(first);
    second.append(&[0]).unwrap();
    drop(second);
    assert_eq!(store.held().reserved, 0);
    drop(blob(&store, 2, 64 * KIB).unwrap());
}

/// Total size of all files in bytes. No reservation is made concurrently. A draft that is renamed during the count
/// is counted once.
fn used(store: &Store) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let _held = store.held();
    let mut files = HashMap::new();
    for name in ["drafts", "blobs"] {
        for entry in fs::read_dir(store.inner.dir.join(name)).unwrap() {
            if let Ok(metadata) = entry.unwrap().metadata() {
                files.insert(metadata.ino(), metadata.blocks() * 512);
            }
        }
    }
    files.values().sum()
}

#[test]
fn many_threads_stay_within_the_quota() {
    let dir = tempfile::tempdir().unwrap();
    let quota = 256 * KIB as u64;
    let store = Store::open(dir.path(), quota).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..8_u8 {
            let store = &store;
            scope.spawn(move || {
                for round in 0..20_u8 {
                    // Some do not fit while other threads hold theirs.
                    let Ok(lease) = blob(store, thread * 20 + round, 48 * KIB) else {
                        continue;
                    };
                    let bytes = fs::read(lease.path()).unwrap();
                    assert!(bytes.iter().all(|byte| *byte == thread * 20 + round));
                    let used = used(store);
                    assert!(used <= quota, "{used}");
                }
            });
        }
    });
    assert_eq!(store.held().reserved, 0);
}

#[test]
fn a_file_with_a_further_name_stays_also_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().join("store");
    let quota = 64 * KIB as u64;
    let template = dir.path().join("root");
    let store = Store::open(&place, quota).unwrap();
    let lease = blob(&store, 1, 40 * KIB).unwrap();
    lease.link(&template).unwrap();
    drop(lease);
    drop(store);
    let store = Store::open(&place, quota).unwrap();
    let error = blob(&store, 2, 40 * KIB).unwrap_err();
    assert!(matches!(error, StoreError::Full { .. }), "{error}");
    assert!(has(&store, 1, 40 * KIB));
    fs::remove_file(&template).unwrap();
    drop(blob(&store, 2, 40 * KIB).unwrap());
    assert!(!has(&store, 1, 40 * KIB));
}

#[test]
fn a_draft_that_begins_again_has_only_what_follows() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path(), 1 << 20).unwrap();
    let mut draft = store.draft(5).unwrap();
    draft.append(b"wrong").unwrap();
    draft.restart().unwrap();
    draft.append(b"right").unwrap();
    let lease = draft.finish_blob(Digest::of(b"right"), 5).unwrap();
    assert_eq!(fs::read(lease.path()).unwrap(), b"right");
}
