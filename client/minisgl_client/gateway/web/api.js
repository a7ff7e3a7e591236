// What the page asks of its gateway: JSON, server-sent events, errors in OpenAI's shape, the key where one is needed.

const KEY = "minisgl.key";
let held = "";
try {
  held = sessionStorage.getItem(KEY) ?? "";
} catch {
  // a browser that keeps nothing: the key lives as long as the page
}
let asker = null;
let asking = null;

/** An answer that is no success. `param` is the field at fault; status 0: nobody answered. */
export class ApiError extends Error {
  constructor(status, message, param = null, code = null) {
    super(message);
    this.status = status;
    this.param = param;
    this.code = code;
  }
}

export const isKeyUsable = (text) => /^[\x21-\x7e]+$/.test(text);

export function keepKey(text) {
  held = text;
  try {
    sessionStorage.setItem(KEY, text);
  } catch {
    // see above
  }
}

/** `ask(wrong)` shows the dialog and resolves to whether there is a key now. */
export function askForKeysWith(ask) {
  asker = ask;
}

/** One request, relative to the page, so that a proxy may put the gateway below a path. Raises ApiError, and AbortError
 *  when the signal ended it. A missing or wrong key is asked for, and the request sent again. */
export async function ask(path, { body, signal } = {}) {
  for (;;) {
    const used = held;
    const response = await reach(path, body, signal);
    if (response.ok) return response;
    const error = await errorOf(response);
    if (response.status !== 401 || asker === null) throw error;
    if (held === used) {
      asking ??= asker(used !== "").finally(() => (asking = null));
      if (!(await asking)) throw error;
    }
    signal?.throwIfAborted();
  }
}

async function reach(path, body, signal) {
  const headers = {};
  if (held) headers.Authorization = `Bearer ${held}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const sent = body === undefined ? undefined : JSON.stringify(body);
  const method = body === undefined ? "GET" : "POST";
  try {
    return await fetch(new URL(path, document.baseURI), { method, headers, body: sent, signal, cache: "no-store" });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ApiError(0, "The gateway can not be reached.");
  }
}

async function errorOf(response) {
  let told = null;
  try {
    told = (await response.json()).error;
  } catch {
    // something between us and the gateway answered
  }
  return fromBody(response.status, told);
}

/** Of `{"message", "param", "code"}`, which also stands in a stream that broke. */
export function fromBody(status, told) {
  const message = typeof told?.message === "string" ? told.message : `The gateway answered with status ${status}.`;
  const param = typeof told?.param === "string" ? told.param : null;
  return new ApiError(status, message, param, typeof told?.code === "string" ? told.code : null);
}

/** The `data` of each server-sent event. Leaving the loop closes the connection. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split(/\r?\n\r?\n/);
      rest = parts.pop();
      for (const part of parts) {
        const lines = part.split(/\r?\n/).filter((line) => line.startsWith("data:"));
        if (lines.length) yield lines.map((line) => line.slice(line[5] === " " ? 6 : 5)).join("\n");
      }
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
}
