// xterm.js writes its theme into <style> elements that it creates. The page's policy allows such an element only with the
// nonce of this answer, so every <style> that this page creates gets it. Nothing else creates one.

const nonce = document.querySelector<HTMLMetaElement>('meta[name="style-nonce"]')?.content ?? "";
const create = document.createElement.bind(document);

document.createElement = ((name: string, options?: ElementCreationOptions) => {
  const element = create(name, options);
  if (element instanceof HTMLStyleElement) {
    element.nonce = nonce;
  }
  return element;
}) as typeof document.createElement;
