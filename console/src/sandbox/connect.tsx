// How programs connect to a sandbox.
import { Copy } from "../ui/copy";
import { Panel } from "../ui/parts";

function snippets(id: string): [string, string][] {
  const at = location.origin;
  return [
    ["Environment", `export E2B_API_URL=${at} E2B_SANDBOX_URL=${at} E2B_API_KEY=…`],
    ["Python", `from e2b import Sandbox\nsandbox = Sandbox.connect("${id}")`],
    ["JavaScript", `import { Sandbox } from 'e2b'\nconst sandbox = await Sandbox.connect('${id}')`],
    ["Shell", `cube sandbox shell ${id}`],
  ];
}

export function Connect({ id }: { id: string }) {
  return (
    <Panel title="Connect">
      <dl class="snippets">
        {snippets(id).map(([name, text]) => (
          <div key={name}>
            <dt>{name}</dt>
            <dd>
              <pre tabIndex={0} aria-label={`${name}: code`}>
                {text}
              </pre>
            </dd>
            <dd>
              <Copy text={text} what={`the ${name} snippet`} />
            </dd>
          </div>
        ))}
      </dl>
    </Panel>
  );
}
