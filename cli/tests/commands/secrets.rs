//! `cube secret`: values are stored and never shown.

use serde_json::Value;
use testbed::server::{Door, Tls};

use crate::world::World;

pub(crate) fn kvm_a_secret_is_stored_listed_updated_and_deleted() {
    const VALUE: &str = "canary-of-the-command-line";
    let world = World::with(Door::Locked, Tls::Off);
    let made = world.run_with(
        &["secret", "create", "OpenAI", "--metadata", "team=a"],
        format!("{VALUE}\n").as_bytes(),
    );
    assert_eq!(made.line(), "${e2b.secrets.openai}");
    let file = world.dir.path().join("value");
    std::fs::write(&file, VALUE).unwrap();
    let file = file.to_str().unwrap();
    let updated = world.run(&["secret", "update", "openai", "--from-file", file]);
    assert_eq!(updated.line(), "openai version 2");
    let listed = world.run(&["--json", "secret", "list"]).expect(0);
    let list: Value = serde_json::from_str(&listed.stdout).unwrap();
    let item = &list["items"][0];
    assert_eq!(
        (&list["kind"], &item["currentVersion"]),
        (&"secret".into(), &2.into())
    );
    assert_eq!(item["metadata"]["team"], "a");
    let info = world
        .run(&["secret", "info", item["secretID"].as_str().unwrap()])
        .expect(0);
    for ran in [&listed, &info] {
        assert!(
            !ran.stdout.contains(VALUE) && ran.stdout.contains("openai"),
            "{}",
            ran.stdout
        );
    }
    let taken = world
        .run(&["secret", "create", "openai", "--from-file", file])
        .expect(1);
    assert!(
        taken.stderr.contains("exists") && !taken.stderr.contains(VALUE),
        "{}",
        taken.stderr
    );
    // No command takes the value as an argument.
    world.run(&["secret", "create", "other", VALUE]).expect(2);
    world
        .run(&["secret", "create", "other", "--from-env", "CUBE_TEST_NONE"])
        .expect(2);
    world.run(&["secret", "create", "other"]).expect(1);
    world.run(&["secret", "delete", "openai"]).expect(0);
    let gone = world.run(&["secret", "info", "openai"]).expect(1);
    assert!(gone.stderr.contains("cube secret list"), "{}", gone.stderr);
}
