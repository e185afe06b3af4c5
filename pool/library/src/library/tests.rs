use model::{SandboxId, template_file};

use super::*;
use crate::{
    fixtures::{image, keep, opened, saved},
    memory_diff,
};

#[test]
fn a_template_that_names_a_file_outside_the_store_is_ignored() {
    let root = tempfile::tempdir().unwrap();
    let (installed, state) = (root.path().join("i"), root.path().join("s"));
    let other = root.path().join("other");
    image(&other, None);
    image(&installed.join("base"), None);
    image(&installed.join("diff"), Some(&installed.join("base")));
    image(&installed.join("shadow"), None);
    let manifest = installed.join("shadow").join(MANIFEST_NAME);
    let text = fs::read_to_string(&manifest).unwrap();
    let mut json: serde_json::Value = serde_json::from_str(&text).unwrap();
    json["root"] = "/etc/passwd".into();
    fs::write(&manifest, json.to_string()).unwrap();
    image(&installed.join("diff-of-other"), Some(&other));
    image(&installed.join("linked"), None);
    std::os::unix::fs::symlink(other.join("root"), installed.join("linked/memory")).unwrap();
    let mut templates = opened(&state, &installed);
    let names: Vec<_> = templates
        .iter()
        .flat_map(|t| t.info.names.clone())
        .collect();
    let mut names: Vec<_> = names.iter().map(String::as_str).collect();
    names.sort_unstable();
    assert_eq!(names, ["base", "diff"]);
    assert!(templates.is_partial());

    // The same is required of a snapshot that a VMM wrote.
    let pause = root.path().join("pause");
    image(&pause, Some(&installed.join("base")));
    assert!(templates.check_snapshot(&pause).is_ok());
    image(&pause, Some(&other));
    assert!(
        templates
            .check_snapshot(&pause)
            .unwrap_err()
            .contains("outside")
    );
    // Allowed once a caller has added the directory.
    let (id, _) = templates.draft().unwrap();
    let elsewhere = Origin::Elsewhere(other.clone());
    keep(&mut templates, &id, vec!["other".into()], elsewhere, 1);
    assert!(templates.check_snapshot(&pause).is_ok());
}

#[test]
fn installed_and_added_templates_are_found_by_every_name() {
    let root = tempfile::tempdir().unwrap();
    let (installed, state) = (root.path().join("i"), root.path().join("s"));
    image(&installed.join("base"), None);
    fs::create_dir(installed.join("no-template")).unwrap();
    let open = || opened(&state, &installed);
    let mut templates = open();
    assert!(!templates.is_partial());
    let base = templates.find("base").unwrap().info.clone();
    assert_eq!((base.id.len(), base.disk.0), (20, 4096));
    assert_eq!(templates.find("base:default").unwrap().info, base);
    assert_eq!(templates.find(&base.id).unwrap().info, base);
    assert!(templates.find("base:v2").is_none());

    fs::create_dir_all(&state).unwrap();
    let names = vec!["mine".to_owned(), "mine:v2".to_owned()];
    let (id, dir) = templates.draft().unwrap();
    image(&dir.join("image"), None);
    let source = SandboxId::from_random([7; 19]);
    let origin = saved(source.clone(), templates.vmms().current().clone());
    keep(&mut templates, &id, names.clone(), origin, 9);
    // An unfinished template is removed at the next start.
    let (half, _) = templates.draft().unwrap();
    let templates = open();
    assert!(templates.get(&half).is_none() && !state.join(half).exists());
    let mine = &templates.find("mine:v2").unwrap().info;
    assert!(mine.kind == TemplateKind::Snapshot && mine.created_unix_s == 9 && mine.names == names);
    assert_eq!(mine.source, Some(source));
    assert_eq!(templates.find("mine:default").unwrap().info.id, id);
}

#[test]
fn names_of_a_template_that_is_not_written_stay_with_their_owner() {
    let root = tempfile::tempdir().unwrap();
    let (installed, state) = (root.path().join("i"), root.path().join("s"));
    fs::create_dir_all(&installed).unwrap();
    fs::create_dir_all(&state).unwrap();
    let mut templates = opened(&state, &installed);
    let vmm = templates.vmms().current().clone();
    let drafted = |templates: &Library| {
        let (id, dir) = templates.draft().unwrap();
        image(&dir.join("image"), None);
        let source = SandboxId::from_random([7; 19]);
        (id, saved(source, vmm.clone()))
    };
    let names = || vec!["mine".to_owned(), "mine:v2".to_owned()];
    let (first, origin) = drafted(&templates);
    keep(&mut templates, &first, names(), origin, 1);
    let (second, origin) = drafted(&templates);
    let new = templates.keep(&second, names(), origin, 2).unwrap();
    assert_eq!(templates.find("mine").unwrap().info.id, second);
    templates.unpublish(&second, new.taken);
    assert_eq!(templates.find("mine").unwrap().info.id, first);

    // A crash of the host may leave the record of the new template and the old record of the other one.
    let (third, origin) = drafted(&templates);
    let new = templates.keep(&third, names(), origin, 2).unwrap();
    new.records[0].write().unwrap();
    for _ in 0..2 {
        let templates = opened(&state, &installed);
        assert_eq!(templates.find("mine:v2").unwrap().info.id, third);
        assert!(templates.get(&first).unwrap().info.names.is_empty());
    }
}

#[test]
fn a_name_moves_and_malformed_names_are_refused() {
    let root = tempfile::tempdir().unwrap();
    let (installed, state) = (root.path().join("i"), root.path().join("s"));
    image(&installed.join("base"), None);
    fs::create_dir_all(&state).unwrap();
    let mut templates = opened(&state, &installed);
    let add = |templates: &mut Library| {
        let (id, dir) = templates.draft().unwrap();
        image(&dir.join("image"), None);
        let source = SandboxId::from_random([7; 19]);
        let origin = saved(source, templates.vmms().current().clone());
        keep(templates, &id, vec!["mine".into()], origin, 1);
        id
    };
    let first = add(&mut templates);
    let second = add(&mut templates);
    let templates = opened(&state, &installed);
    assert_eq!(templates.find("mine").unwrap().info.id, second);
    assert!(templates.get(&first).unwrap().info.names.is_empty());
    for wrong in [
        "",
        "a b",
        ":x",
        "a:b:c",
        "base",
        "-x",
        &first,
        &"x".repeat(129),
    ] {
        assert!(
            templates.check_names(&[wrong.to_owned()]).is_err(),
            "{wrong}"
        );
    }
    assert!(
        templates
            .check_names(&["a".into(), "a:default".into()])
            .is_err()
    );
    assert!(templates.check_names(&["a".into(), "a:b".into()]).is_ok());
}

#[test]
fn a_template_stored_as_a_diff_needs_its_base_and_is_not_used_without_it() {
    let root = tempfile::tempdir().unwrap();
    let (installed, state) = (root.path().join("i"), root.path().join("s"));
    fs::create_dir_all(&installed).unwrap();
    let mut templates = opened(&state, &installed);
    let (id, dir) = templates.draft().unwrap();
    let files = dir.join(IMAGE);
    image(&files, None);
    let source = SandboxId::from_random([7; 19]);
    let origin = saved(source, templates.vmms().current().clone());
    keep(&mut templates, &id, vec![], origin, 1);
    let new = &templates.get(&id).unwrap().storage;
    assert!(matches!(new, Storage::New { .. }));

    let base = templates.images().dir().join("05".repeat(32));
    fs::create_dir(&base).unwrap();
    let header = memory_diff::Header {
        length: 1 << 20,
        loaded_bytes: 4 << 20,
        base: Some([5; 32]),
    };
    let mut diff = Vec::new();
    header.write(&mut diff).unwrap();
    fs::write(files.join(memory_diff::NAME), diff).unwrap();
    fs::write(files.join(template_file::MEMORY), "made from the diff").unwrap();
    let without = opened(&state, &installed);
    assert!(without.get(&id).is_none() && without.is_partial());
    assert!(
        files.join(template_file::MEMORY).exists(),
        "nothing is removed"
    );

    fs::write(base.join(template_file::MEMORY), "").unwrap();
    let templates = opened(&state, &installed);
    let template = templates.get(&id).unwrap();
    assert_eq!(template.loaded_bytes, 4 << 20);
    assert!(template.needs().contains(&base) && !templates.is_partial());
    assert!(!files.join(template_file::MEMORY).exists());
}
