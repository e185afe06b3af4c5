//! The life cycle of sandboxes.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use envd::Timestamp;
use serde_json::{Value, json};

use crate::process::{Sandbox, Server, until};

pub(crate) fn kvm_a_sandbox_is_created_looked_at_and_ended() {
    let server = Server::open();
    let options = json!({"metadata": {"k": "v w"}, "envVars": {"X": "1"}});
    let sandbox = server.create(&options);
    assert!(server.is_up(&sandbox));
    let detail = server.get(&sandbox.path("")).expect(200).json();
    assert_eq!(detail["state"], "running");
    assert_eq!(detail["metadata"]["k"], "v w");
    assert_eq!(detail["envdAccessToken"], sandbox.token.as_str());
    assert_eq!(
        detail["lifecycle"],
        json!({"autoResume": false, "onTimeout": "kill"})
    );
    assert!(detail["memoryMB"].as_u64().unwrap() > 0);
    assert_eq!(detail["alias"], "base");
    let old = json!({"templateID": "base", "secure": false, "allow_internet_access": true});
    let old = server.post("/sandboxes", &old).expect(201).json();
    assert!(old.get("envdAccessToken").is_none());
    let old = Sandbox::of(&old);
    server.read_file(&old, "/etc/hostname");
    for sandbox in [sandbox, old] {
        server.delete(&sandbox.path("")).expect(204);
        server.delete(&sandbox.path("")).expect(404);
        server.get(&sandbox.path("")).expect(404);
        assert!(!server.is_up(&sandbox));
    }
    assert_eq!(server.get("/v2/sandboxes").expect(200).json(), json!([]));
}

/// Clients that build names of sandboxes themselves send code and tokens to them.
pub(crate) fn kvm_a_server_without_a_domain_names_one_that_does_not_exist() {
    let server = Server::open();
    let created = server.ask(&json!({})).expect(201).json();
    let sandbox = Sandbox::of(&created);
    let connect = sandbox.path("/connect");
    let connected = server.post(&connect, &json!({"timeout": 60})).expect(200);
    let forked = server.post(&sandbox.path("/fork"), &json!({})).expect(201);
    let detail = server.get(&sandbox.path("")).expect(200).json();
    for answer in [
        created,
        connected.json(),
        forked.json()[0]["sandbox"].clone(),
        detail,
    ] {
        let text = |field: &str| answer[field].as_str().unwrap().to_owned();
        let host = format!("49999-{}.{}", text("sandboxID"), text("domain"));
        assert!(host.ends_with(".invalid"), "{host}");
        assert!(host.split('.').all(|label| label.len() <= 63), "{host}");
    }
}

pub(crate) fn kvm_lists_are_filtered_and_paged() {
    let server = Server::open();
    let make = |n: u32| server.create(&json!({"metadata": {"n": n.to_string(), "a": "b c"}}));
    let sandboxes: Vec<_> = (0..3).map(make).collect();
    server
        .post(&sandboxes[0].path("/pause"), &json!({}))
        .expect(204);
    let ids = |answer: &Value| -> Vec<String> {
        let list = answer.as_array().unwrap().iter();
        list.map(|s| s["sandboxID"].as_str().unwrap().to_owned())
            .collect()
    };
    let list = |query: &str| {
        ids(&server
            .get(&format!("/v2/sandboxes{query}"))
            .expect(200)
            .json())
    };
    // Latest first.
    let all = [&sandboxes[2], &sandboxes[1], &sandboxes[0]].map(|s| s.id.clone());
    assert_eq!(list(""), all);
    assert_eq!(list("?state=paused"), all[2..]);
    assert_eq!(
        list("?state=running,paused&order=asc"),
        [&all[2], &all[1], &all[0]].map(Clone::clone)
    );
    assert_eq!(list("?metadata=n%3D1%26a%3Db%252520c"), all[1..2]);
    assert_eq!(list("?metadata=n%3D9"), Vec::<String>::new());
    assert_eq!(list("?template=base&limit=2"), all[..2]);
    assert_eq!(list("?template=other"), Vec::<String>::new());
    let second = server.get(&sandboxes[1].path("")).expect(200).json();
    let since = second["startedAt"].as_str().unwrap().replace('+', "%2B");
    assert_eq!(list(&format!("?startedAfter={since}")), all[..2]);
    let running = server.get("/sandboxes").expect(200).json();
    assert_eq!(ids(&running), all[..2]);
    let mut paged = Vec::new();
    let mut token = String::new();
    loop {
        let page = server
            .get(&format!("/v2/sandboxes?limit=1{token}"))
            .expect(200);
        assert_eq!(page.header("x-total-running"), Some("2"));
        paged.extend(ids(&page.json()));
        match page.header("x-next-token") {
            Some(next) => token = format!("&nextToken={next}"),
            None => break,
        }
    }
    assert_eq!(paged, all);
}

pub(crate) fn kvm_timeouts_are_set_shortened_and_never_shortened_by_connect() {
    let server = Server::open();
    let sandbox = server.create(&json!({"timeout": 600}));
    let end = || {
        let detail = server.get(&sandbox.path("")).expect(200).json();
        detail["endAt"].as_str().unwrap().to_owned()
    };
    let first = end();
    let connect = format!("/v2{}", sandbox.path("/connect"));
    server.post(&connect, &json!({"timeout": 10})).expect(200);
    server.post(&connect, &json!({})).expect(200);
    server
        .post(&sandbox.path("/refreshes"), &json!({"duration": 20}))
        .expect(204);
    assert_eq!(end(), first, "something shortened it");
    let old = server
        .post(&sandbox.path("/connect"), &json!({"timeout": 900}))
        .expect(200);
    assert_eq!(old.json()["envdAccessToken"], sandbox.token.as_str());
    assert!(end() > first, "connect did not extend the timeout");
    server
        .post(&sandbox.path("/connect"), &json!({}))
        .expect(400);
    server
        .post(&sandbox.path("/timeout"), &json!({"timeout": -1}))
        .expect(400);
    server
        .post(&sandbox.path("/timeout"), &json!({"timeout": 1}))
        .expect(204);
    assert!(end() < first, "set_timeout did not shorten the timeout");
    until("its end comes", || !server.is_up(&sandbox));
    server
        .post(&sandbox.path("/timeout"), &json!({"timeout": 60}))
        .expect(404);
    server.post(&connect, &json!({"timeout": 60})).expect(404);
}

pub(crate) fn kvm_requests_prolong_a_life_up_to_its_maximum() {
    let server = Server::open();
    let lifecycle = json!({"onActivity": {"maxTimeout": 18}});
    let sandbox = server.create(&json!({"timeout": 16, "lifecycle": lifecycle}));
    let detail = || server.get(&sandbox.path("")).expect(200).json();
    let first = detail();
    assert_eq!(first["lifecycle"]["onActivity"]["maxTimeout"], 18);
    until("a request moves the deadline to the maximum", || {
        server.is_up(&sandbox) && detail()["endAt"] != first["endAt"]
    });
    let time = |of: &str| Timestamp::parse(detail()[of].as_str().unwrap()).unwrap();
    let lived_ns = time("endAt").unix_ns() - time("startedAt").unix_ns();
    assert_eq!(lived_ns, 18_000_000_000);
    let wrong = json!({"lifecycle": {"onActivity": {"maxTimeout": 0}}});
    server.ask(&wrong).expect(400);
}

pub(crate) fn kvm_a_pause_keeps_memory_and_a_resume_goes_on() {
    let server = Server::open();
    let sandbox = server.create(&json!({}));
    server.write_file(&sandbox, "/dev/shm/note", "in memory");
    let boot = server.boot_id(&sandbox);
    server.post(&sandbox.path("/pause"), &json!({})).expect(204);
    server.post(&sandbox.path("/pause"), &json!({})).expect(409);
    assert_eq!(server.state_of(&sandbox), "paused");
    assert!(
        !server.is_up(&sandbox),
        "traffic resumed a sandbox without auto-resume"
    );
    assert_eq!(server.state_of(&sandbox), "paused");
    server
        .post(&sandbox.path("/timeout"), &json!({"timeout": 9}))
        .expect(404);
    let connect = format!("/v2{}", sandbox.path("/connect"));
    for path in [&connect, &sandbox.path("/resume")] {
        server.post(path, &json!({"memory": false})).expect(501);
    }
    let resumed = server
        .post(&connect, &json!({"timeout": 60}))
        .expect(201)
        .json();
    assert_eq!(resumed["envdAccessToken"], sandbox.token.as_str());
    server.post(&connect, &json!({"timeout": 60})).expect(200);
    assert_eq!(server.read_file(&sandbox, "/dev/shm/note"), "in memory");
    assert_eq!(server.boot_id(&sandbox), boot);
    server
        .post(&sandbox.path("/resume"), &json!({"timeout": 60}))
        .expect(409);
    let healthy = json!({"memory": true, "requireHealthyGuest": true});
    server.post(&sandbox.path("/pause"), &healthy).expect(204);
    server
        .post(
            &sandbox.path("/resume"),
            &json!({"timeout": 60, "autoPause": true}),
        )
        .expect(201);
    let detail = server.get(&sandbox.path("")).expect(200).json();
    assert_eq!(detail["lifecycle"]["onTimeout"], "pause");
    server.post(&sandbox.path("/pause"), &json!({})).expect(204);
    server.delete(&sandbox.path("")).expect(204);
    server.post(&connect, &json!({})).expect(404);
}

pub(crate) fn kvm_a_pause_without_memory_is_a_cold_boot() {
    let server = Server::open();
    let sandbox = server.create(&json!({"autoResume": {"enabled": true}}));
    server.write_file(&sandbox, "/home/user/note", "on disk");
    server.write_file(&sandbox, "/dev/shm/note", "in memory");
    let boot = server.boot_id(&sandbox);
    server
        .post(&sandbox.path("/pause"), &json!({"memory": false}))
        .expect(204);
    let detail = server.get(&sandbox.path("")).expect(200).json();
    assert_eq!(detail["pauseMode"], "filesystem");
    assert!(
        !server.is_up(&sandbox),
        "traffic resumed a sandbox without memory"
    );
    let connect = format!("/v2{}", sandbox.path("/connect"));
    server
        .post(&connect, &json!({"timeout": 60, "memory": false}))
        .expect(201);
    assert_eq!(server.read_file(&sandbox, "/home/user/note"), "on disk");
    let second = server.boot_id(&sandbox);
    assert_ne!(second, boot);
    let no_memory = json!({"memory": false});
    server.post(&sandbox.path("/pause"), &no_memory).expect(204);
    server
        .post(&sandbox.path("/resume"), &no_memory)
        .expect(201);
    assert_ne!(server.boot_id(&sandbox), second);
    let gone = server.envd(
        &sandbox,
        "GET",
        "/files?username=root&path=/dev/shm/note",
        b"",
    );
    gone.expect(404);
}

pub(crate) fn kvm_an_automatic_pause_ends_with_traffic() {
    let server = Server::open();
    let options = json!({"timeout": 300, "autoPause": true, "autoResume": {"enabled": true}});
    let sandbox = server.create(&options);
    server.write_file(&sandbox, "/dev/shm/note", "in memory");
    server
        .post(&sandbox.path("/timeout"), &json!({"timeout": 1}))
        .expect(204);
    until("the sandbox is paused", || {
        server.state_of(&sandbox) == "paused"
    });
    // When traffic resumes a sandbox, the sandbox gets the timeout that a client last requested.
    let wakes = || {
        server.envd(
            &sandbox,
            "GET",
            "/files?username=root&path=/dev/shm/note",
            b"",
        )
    };
    assert_eq!(wakes().expect(200).text(), "in memory");
    until("the sandbox is paused again", || {
        server.state_of(&sandbox) == "paused"
    });
    let connect = format!("/v2{}", sandbox.path("/connect"));
    server.post(&connect, &json!({"timeout": 300})).expect(201);
    assert_eq!(server.state_of(&sandbox), "running");
}

pub(crate) fn kvm_a_sandbox_that_was_paused_by_a_timeout_of_zero_stays_when_it_is_resumed() {
    let server = Server::open();
    let options = json!({"timeout": 60, "autoPause": true, "autoResume": {"enabled": true}});
    let sandbox = server.create(&options);
    server.write_file(&sandbox, "/dev/shm/note", "in memory");
    let pause_now = || {
        server
            .post(&sandbox.path("/timeout"), &json!({"timeout": 0}))
            .expect(204);
        until("the sandbox is paused", || {
            server.state_of(&sandbox) == "paused"
        });
    };
    // Remaining time in whole seconds.
    let left = || {
        let detail = server.get(&sandbox.path("")).expect(200).json();
        assert_eq!(detail["state"], "running");
        let end = Timestamp::parse(detail["endAt"].as_str().unwrap()).unwrap();
        let end = UNIX_EPOCH + Duration::from_nanos(end.unix_ns());
        end.duration_since(SystemTime::now())
            .map_or(0, |left| left.as_secs())
    };
    pause_now();
    let connect = format!("/v2{}", sandbox.path("/connect"));
    server.post(&connect, &json!({})).expect(201);
    assert_eq!(server.read_file(&sandbox, "/dev/shm/note"), "in memory");
    assert!((200..=300).contains(&left()), "{} s", left());
    pause_now();
    assert_eq!(server.read_file(&sandbox, "/dev/shm/note"), "in memory");
    assert!((200..=300).contains(&left()), "{} s", left());
}

pub(crate) fn kvm_snapshots_and_forks_have_what_the_source_had() {
    let server = Server::open();
    let source = server.create(&json!({"metadata": {"k": "v"}}));
    server.write_file(&source, "/dev/shm/note", "before");
    let body = json!({"name": "mine:one"});
    let snapshot = server
        .post(&source.path("/snapshots"), &body)
        .expect(201)
        .json();
    assert_eq!(snapshot["names"], json!(["mine:one"]));
    assert!(server.is_up(&source));
    let forks = json!({"count": 2, "timeout": 60});
    let forks = server
        .post(&source.path("/fork"), &forks)
        .expect(201)
        .json();
    server.write_file(&source, "/dev/shm/note", "after");
    for fork in forks.as_array().unwrap() {
        let fork = Sandbox::of(&fork["sandbox"]);
        assert_ne!(fork.token, source.token);
        assert_eq!(server.read_file(&fork, "/dev/shm/note"), "before");
        let detail = server.get(&fork.path("")).expect(200).json();
        assert_eq!(detail["metadata"]["k"], "v");
        server.delete(&fork.path("")).expect(204);
    }
    assert_eq!(server.read_file(&source, "/dev/shm/note"), "after");
    let id = snapshot["snapshotID"].as_str().unwrap();
    for reference in [id, "mine:one"] {
        let clone = server.create(&json!({"templateID": reference}));
        assert_eq!(server.read_file(&clone, "/dev/shm/note"), "before");
        server.delete(&clone.path("")).expect(204);
    }
    let listed = server.get("/snapshots").expect(200).json();
    assert_eq!(listed, json!([snapshot]));
    assert_eq!(
        server.get("/snapshots?name=other").expect(200).json(),
        json!([])
    );
    let other = server.create(&json!({}));
    for (sandbox, made_of_it) in [(&source, json!([snapshot])), (&other, json!([]))] {
        let path = format!("/snapshots?sandboxID={}", sandbox.id);
        assert_eq!(server.get(&path).expect(200).json(), made_of_it);
    }
    server.delete(&format!("/templates/{id}")).expect(204);
    server.delete(&format!("/templates/{id}")).expect(404);
    for wrong in [
        json!({"count": 0}),
        json!({"count": 101}),
        json!({"count": -1}),
    ] {
        server.post(&source.path("/fork"), &wrong).expect(400);
    }
}

pub(crate) fn kvm_figures_and_logs_are_there() {
    let server = Server::open();
    let sandbox = server.create(&json!({}));
    let figures = || server.get(&sandbox.path("/metrics")).expect(200).json();
    until("a sample is taken", || figures() != json!([]));
    let sample = figures()[0].clone();
    assert!(sample["memUsed"].as_u64().unwrap() > 0, "{sample}");
    assert!(
        sample["memTotal"].as_u64().unwrap() >= sample["memUsed"].as_u64().unwrap(),
        "{sample}"
    );
    let later = server
        .get(&sandbox.path("/metrics?start=9999999999"))
        .expect(200);
    assert_eq!(later.json(), json!([]));
    let several = format!(
        "/sandboxes/metrics?sandbox_ids={},iaaaaaaaaaaaaaaaaaaa",
        sandbox.id
    );
    let several = server.get(&several).expect(200).json();
    assert!(
        several["sandboxes"][&sandbox.id]["cpuCount"]
            .as_u64()
            .unwrap()
            > 0
    );
    let logs = server.get(&sandbox.path("/logs")).expect(200).json();
    let line = logs["logs"][0]["line"].as_str().unwrap();
    let line: Value = serde_json::from_str(line).unwrap();
    assert_eq!(line["level"], "info");
    let newer = format!("/v2{}", sandbox.path("/logs?direction=backward&limit=1"));
    assert_eq!(
        server.get(&newer).expect(200).json()["logs"]
            .as_array()
            .unwrap()
            .len(),
        1
    );
    let of_level = |level: &str| {
        let path = format!("/v2{}?level={level}", sandbox.path("/logs"));
        server.get(&path).expect(200).json()["logs"].clone()
    };
    assert_ne!(of_level("info"), json!([]));
    assert_eq!(of_level("warn"), json!([]));
    let text = server.get("/metrics").expect(200).text();
    assert!(text.contains("cube_pool_running 1\n"), "{text}");
    let created =
        "cube_api_requests_total{method=\"POST\",route=\"/v2/sandboxes\",status=\"201\"} 1";
    assert!(text.contains(created), "{text}");
    assert!(text.contains("cube_start_phase_seconds_bucket"), "{text}");
    // Sampling continues while clients read metrics.
    until("a second sample is taken", || {
        figures().as_array().unwrap().len() > 1
    });
}
