use super::*;

#[test]
fn a_sandbox_whose_arrival_is_not_synced_is_still_on_its_way() {
    let root = tempfile::tempdir().unwrap();
    let path = |name: &str| root.path().join(name);
    let (from, to) = (path("incoming/i"), path("sandboxes/i"));
    for dir in [&from, &path("sandboxes")] {
        fs::create_dir_all(dir).unwrap();
    }
    fs::write(from.join("record.json"), "{}").unwrap();
    let broken = || io::Error::from(nix::errno::Errno::EIO);
    for parent in [path("sandboxes"), path("incoming")] {
        let sync = |dir: &Path| {
            if dir == parent {
                return Err(broken());
            }
            sync_dir(dir)
        };
        assert!(arrive(&from, &to, sync).is_err());
        assert!(from.join("record.json").exists() && !to.exists());
    }
    // It cannot be moved back: then it is here, and its giver may remove its files.
    let sync = |_: &Path| {
        fs::create_dir_all(&from).unwrap();
        fs::write(from.join("in the way"), "").unwrap();
        Err(broken())
    };
    arrive(&from, &to, sync).unwrap();
    assert!(to.join("record.json").exists());

    fs::remove_dir_all(&from).unwrap();
    fs::rename(&to, &from).unwrap();
    arrive(&from, &to, sync_dir).unwrap();
    assert!(to.join("record.json").exists() && !from.exists());
}
