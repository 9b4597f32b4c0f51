"""The official anthropic client: messages, whole and streamed, with a loop of tools, and what counts tokens."""
import pytest

anthropic = pytest.importorskip("anthropic", reason="the package anthropic is not installed")

TOOL = {"name": "get_weather", "description": "The weather of a city", "cache_control": {"type": "ephemeral"},
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}


def client_of(server, key="secret-key"):
    return anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0)


def create(client, stream, **fields):
    if not stream:
        return client.messages.create(**fields)
    with client.messages.stream(**fields) as events:
        kinds = [event.type for event in events]
        message = events.get_final_message()
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop" and kinds.count("message_delta") == 1
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == len(message.content)
    return message


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("question, cities", [("What is the weather in Paris", ["Paris"]),
                                              ("What is the weather in Paris and Rome", ["Paris", "Rome"])])
def test_tool_loop(scripted, stream, question, cities):
    client = client_of(scripted)
    messages = [{"role": "user", "content": question}]
    common = {"model": "scripted", "max_tokens": 1000, "tools": [TOOL],
              "system": [{"type": "text", "text": "Use tools.", "cache_control": {"type": "ephemeral"}}]}
    first = create(client, stream, messages=messages, **common)
    assert first.stop_reason == "tool_use" and first.role == "assistant"
    calls = [block for block in first.content if block.type == "tool_use"]
    assert [call.input for call in calls] == [{"city": city} for city in cities]
    if len(cities) == 1:
        assert [block.type for block in first.content] == ["thinking", "text", "tool_use"]
        assert first.content[0].thinking == "I should look." and first.content[1].text == "Let me look."
    messages.append({"role": "assistant", "content": first.content})
    messages.append({"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": call.id, "content": f"18 degrees in {call.input['city']}"} for call in calls]})
    answer = create(client, stream, messages=messages, **common)
    assert answer.stop_reason == "end_turn"
    assert answer.content[0].text == f"The tool says: 18 degrees in {cities[-1]}"
    assert answer.usage.cache_read_input_tokens == 2 and answer.usage.output_tokens > 0
    del common["max_tokens"]
    counted = client.messages.count_tokens(messages=messages, **common)
    assert counted.input_tokens == answer.usage.input_tokens + 2


@pytest.mark.parametrize("stream", [False, True])
def test_stop_sequences_and_limits(scripted, stream):
    client = client_of(scripted)
    fields = {"model": "scripted", "messages": [{"role": "user", "content": "one two three"}]}
    stopped = create(client, stream, max_tokens=100, stop_sequences=["two"], **fields)
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "two")
    assert stopped.content[0].text == "Hello! You said: one "
    assert create(client, stream, max_tokens=2, **fields).stop_reason == "max_tokens"


def test_the_runner_of_tools(scripted):
    """The client's own loop, as agents use it."""
    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """The weather of a city."""
        return f"18 degrees in {city}"

    runner = client_of(scripted).beta.messages.tool_runner(
        model="scripted", max_tokens=500, tools=[get_weather],
        messages=[{"role": "user", "content": "What is the weather in Paris"}])
    assert runner.until_done().content[0].text == "The tool says: 18 degrees in Paris"


def test_errors(scripted, demo):
    client = client_of(scripted)
    message = [{"role": "user", "content": "x"}]
    with pytest.raises(anthropic.NotFoundError) as error:
        client.messages.create(model="claude", max_tokens=5, messages=message)
    assert error.value.body["type"] == "error" and error.value.body["error"]["type"] == "not_found_error"
    assert error.value.request_id
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    with pytest.raises(anthropic.BadRequestError, match="image"):
        client.messages.create(model="scripted", max_tokens=5, messages=[{"role": "user", "content": [image]}])
    with pytest.raises(anthropic.BadRequestError, match="web_search_20250305"):
        client.messages.create(model="scripted", max_tokens=5, messages=message,
                               tools=[{"type": "web_search_20250305", "name": "web_search"}])
    with pytest.raises(anthropic.AuthenticationError):
        client_of(demo, "wrong").messages.create(model="demo", max_tokens=5, messages=message)


def test_models(demo):
    (model,) = client_of(demo).models.list()
    assert (model.id, model.type) == ("demo", "model")
    assert client_of(demo).models.retrieve("demo").id == "demo"


@pytest.mark.parametrize("stream", [False, True])
def test_demo_model(demo, stream):
    """The demo model knows no tools: the loop ends with its first answer, and what was called elsewhere can be told to it."""
    client = client_of(demo)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    # The client has no field for a temperature any more; the server has.
    fields = {"model": "demo", "max_tokens": 24, "tools": [TOOL], "extra_body": {"temperature": 0}}
    answer = create(client, stream, messages=messages, **fields)
    assert answer.content and answer.stop_reason in ("end_turn", "max_tokens") and answer.usage.output_tokens > 0
    messages += [{"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "get_weather", "input": {"city": "Paris"}}]},
                 {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "18 degrees"}]}]
    told = create(client, stream, messages=messages, **fields)
    assert told.content and told.usage.input_tokens + told.usage.cache_read_input_tokens > answer.usage.input_tokens
    assert create(client, not stream, messages=messages, **fields).content == told.content


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", [{"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "get_weather"}],
                         ids=["any", "tool"])
def test_tool_loop_of_the_demo_model(demanding, stream, choice):
    """It calls because it must: call, result, answer."""
    client = client_of(demanding)
    schema = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"], "additionalProperties": False}
    common = {"model": "demo", "tools": [{**TOOL, "input_schema": schema}], "extra_body": {"temperature": 0}}
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    first = create(client, stream, messages=messages, max_tokens=200, tool_choice=choice, **common)
    assert first.stop_reason == "tool_use"
    (call,) = [block for block in first.content if block.type == "tool_use"]
    assert call.name == "get_weather" and call.input["city"] in ("Paris", "Rome")
    messages.append({"role": "assistant", "content": first.content})
    messages.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "18 degrees"}]})
    answer = create(client, stream, messages=messages, max_tokens=24, tool_choice={"type": "none"}, **common)
    assert answer.content and {block.type for block in answer.content} <= {"thinking", "text"}
    assert answer.stop_reason in ("end_turn", "max_tokens") and answer.usage.output_tokens > 0
