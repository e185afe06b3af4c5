// How programs connect to a sandbox.
import { t } from "../i18n";
import { Copy } from "../ui/copy";
import { Panel } from "../ui/parts";

function snippets(id: string): [string, string][] {
  const at = location.origin;
  return [
    [t.connect.environment, `export E2B_API_URL=${at} E2B_SANDBOX_URL=${at} E2B_API_KEY=…`],
    ["Python", `from e2b import Sandbox\nsandbox = Sandbox.connect("${id}")`],
    ["JavaScript", `import { Sandbox } from 'e2b'\nconst sandbox = await Sandbox.connect('${id}')`],
    [t.connect.shell, `cube sandbox shell ${id}`],
  ];
}

export function Connect({ id }: { id: string }) {
  return (
    <Panel title={t.connect.title}>
      <dl class="snippets">
        {snippets(id).map(([name, text]) => (
          <div key={name}>
            <dt>{name}</dt>
            <dd>
              <pre tabIndex={0} aria-label={t.connect.code(name)}>
                {text}
              </pre>
            </dd>
            <dd>
              <Copy text={text} what={t.connect.snippet(name)} />
            </dd>
          </div>
        ))}
      </dl>
    </Panel>
  );
}
