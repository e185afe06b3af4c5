use super::*;

/// A file `x` that is replaced by a rename, with the given syncs.
fn replaced(syncs: [bool; 2]) -> Recording {
    let open = |path: &str| Step::Open {
        path: path.into(),
        truncates: false,
    };
    let write = |path: &str, text: &str| Step::Write(path.into(), None, text.into());
    let mut steps = vec![open("/s/x"), write("/s/x", "old")];
    steps.push(Step::Write("/marks".into(), None, b"checkpoint\n".to_vec()));
    steps.extend([open("/s/x.new"), write("/s/x.new", "new!")]);
    steps.extend(syncs[0].then(|| Step::Sync("/s/x.new".into())));
    steps.push(Step::Rename("/s/x.new".into(), "/s/x".into()));
    steps.extend(syncs[1].then(|| Step::Sync("/s".into())));
    steps.push(Step::Write("/marks".into(), None, b"done\n".to_vec()));
    let mut builder = Builder::default();
    for step in steps {
        builder.add(step, Path::new("/s"), Path::new("/marks"));
    }
    builder.finish()
}

/// The contents of `x` after the crashes before or after the mark `done`.
fn contents(recording: &Recording, is_done: bool) -> BTreeSet<String> {
    let crashes = recording.crashes().into_iter().filter(|crash| {
        let marks = recording.marks(crash.at);
        marks.contains(&"checkpoint") && marks.contains(&"done") == is_done
    });
    let x = |crash: Crash| crash.tree.file(Path::new("x")).map(<[u8]>::to_vec);
    let texts = crashes.filter_map(x);
    texts
        .map(|bytes| String::from_utf8(bytes).unwrap())
        .collect()
}

#[test]
fn a_synced_replacement_leaves_the_old_or_the_new_file_and_then_the_new_one() {
    let recording = replaced([true, true]);
    let either = BTreeSet::from(["old".to_owned(), "new!".to_owned()]);
    assert_eq!(contents(&recording, false), either);
    assert_eq!(
        contents(&recording, true),
        BTreeSet::from(["new!".to_owned()])
    );
}

#[test]
fn a_missing_sync_leaves_torn_contents_or_the_old_name() {
    let torn = contents(&replaced([false, true]), true);
    let all = ["", "\0\0\0\0", "ne", "new!"].map(str::to_owned);
    assert!(torn.is_subset(&BTreeSet::from(all)), "{torn:?}");
    assert!(torn.contains("new!") && torn.len() > 1, "{torn:?}");
    let unsynced_name = contents(&replaced([true, false]), true);
    let either = BTreeSet::from(["old".to_owned(), "new!".to_owned()]);
    assert_eq!(unsynced_name, either);
    // Leaving a sync out of a recording has the same effect.
    let full = replaced([true, true]);
    let syncs: Vec<_> = full.syncs().into_iter().map(|(n, _)| n).collect();
    assert_eq!(contents(&full.without(syncs[0]), true), torn);
    assert_eq!(contents(&full.without(syncs[1]), true), either);
}
